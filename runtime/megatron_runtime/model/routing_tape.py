"""The experts that one forward pass replays, and those that it selects."""

from __future__ import annotations

import torch
from torch import Tensor


class RoutingTape:
    """The selections of the routers in one pass over T tokens, in the order of the layers.

    Args:
        replayed: int64 [T, layers with experts, experts per token], the experts to use; in rows of -1 the router
            selects them. None: it selects all.
    """

    def __init__(self, replayed: Tensor | None = None) -> None:
        self._replayed = replayed
        self._chosen: list[Tensor] = []

    def replayed(self) -> Tensor | None:
        """int64 [T, experts per token] for the next layer, or None."""
        return None if self._replayed is None else self._replayed[:, len(self._chosen)]

    def note(self, chosen: Tensor) -> None:
        """Add the selection of the next layer, int64 [T, experts per token]."""
        self._chosen.append(chosen)

    def chosen(self) -> Tensor:
        """int16 [T, layers with experts, experts per token], on the host."""
        return torch.stack(self._chosen, dim=1).to("cpu", torch.int16)
