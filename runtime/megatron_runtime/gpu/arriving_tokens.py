"""Tokens that are copied from a GPU to the host while both go on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HOST_BUFFERS = 2
"""The tokens of a pass are read after the next pass has begun."""


class ArrivingTokens:
    """The tokens of one pass."""

    def __init__(
        self, values: NDArray[np.int64], has_arrived: torch.cuda.Event, await_event: Callable[[torch.cuda.Event], None]
    ) -> None:
        self._values = values
        self._has_arrived = has_arrived
        self._await_event = await_event

    def wait(self) -> NDArray[np.int64]:
        """All tokens, once they have arrived; valid until the second next copy."""
        self._await_event(self._has_arrived)
        return self._values


class TokenCopies:
    """Pinned memory for the tokens of successive passes.

    Args:
        tokens: int64 [S] on the GPU, where each pass writes its tokens.
        await_event: Waits for an event, as `parallel.ranks.Ranks.await_device`.
    """

    def __init__(self, tokens: Tensor, await_event: Callable[[torch.cuda.Event], None]) -> None:
        self._tokens = tokens
        self._await_event = await_event
        self._pinned = [torch.zeros(len(tokens), dtype=tokens.dtype, pin_memory=True) for _ in range(_HOST_BUFFERS)]
        self._events = [torch.cuda.Event() for _ in range(_HOST_BUFFERS)]  # type: ignore[no-untyped-call]

    def begin(self) -> ArrivingTokens:
        """Copy the tokens in the order of the current stream, without waiting for them."""
        self._pinned.reverse()
        self._events.reverse()
        self._pinned[0].copy_(self._tokens, non_blocking=True)
        self._events[0].record()
        return ArrivingTokens(self._pinned[0].numpy(), self._events[0], self._await_event)
