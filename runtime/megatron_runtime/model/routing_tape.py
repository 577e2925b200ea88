"""The experts that one forward pass has to choose, and those that it has chosen."""

from __future__ import annotations

import torch
from torch import Tensor


class RoutingTape:
    """The choices of the routers in one pass over T tokens, layer by layer in their order.

    Args:
        replayed: int64 [T, layers with experts, experts per token], the experts to choose; in rows of -1 the router
            chooses. None: it chooses everywhere.
    """

    def __init__(self, replayed: Tensor | None = None) -> None:
        self._replayed = replayed
        self._chosen: list[Tensor] = []

    def replayed(self) -> Tensor | None:
        """int64 [T, experts per token] for the next layer, or None."""
        return None if self._replayed is None else self._replayed[:, len(self._chosen)]

    def note(self, chosen: Tensor) -> None:
        """Add the choices of the next layer, int64 [T, experts per token]."""
        self._chosen.append(chosen)

    def chosen(self) -> Tensor:
        """int16 [T, layers with experts, experts per token], on the host."""
        return torch.stack(self._chosen, dim=1).to("cpu", torch.int16)
