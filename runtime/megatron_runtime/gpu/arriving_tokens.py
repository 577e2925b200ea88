"""Tokens that are copied from a GPU to the host while both go on."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HOST_BUFFERS = 2
"""The tokens of a pass are read after the next pass has begun."""


class ArrivingTokens:
    """The tokens of one pass."""

    def __init__(self, values: NDArray[np.int64], has_arrived: torch.cuda.Event) -> None:
        self._values = values
        self._has_arrived = has_arrived

    def wait(self) -> NDArray[np.int64]:
        """All tokens, once they have arrived; valid until the second next copy."""
        self._has_arrived.synchronize()
        return self._values


class TokenCopies:
    """Pinned memory for the tokens of successive passes.

    Args:
        tokens: int64 [S] on the GPU, where each pass writes its tokens.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._pinned = [torch.zeros(len(tokens), dtype=tokens.dtype, pin_memory=True) for _ in range(_HOST_BUFFERS)]
        self._events = [torch.cuda.Event() for _ in range(_HOST_BUFFERS)]  # type: ignore[no-untyped-call]

    def begin(self) -> ArrivingTokens:
        """Copy the tokens in the order of the current stream, without waiting for them."""
        self._pinned.reverse()
        self._events.reverse()
        self._pinned[0].copy_(self._tokens, non_blocking=True)
        self._events[0].record()
        return ArrivingTokens(self._pinned[0].numpy(), self._events[0])
