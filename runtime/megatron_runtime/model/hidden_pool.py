"""Sums of hidden states over the tokens of each request, for embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 256
"""Rows that are summed at a time: their float64 would otherwise be several times as large as a layer's activations."""


class HiddenPool:
    """The sums of one pass, over some of its tokens.

    They are float64, so that the division of a prompt into passes changes them by less than a rounding of float32.

    Args:
        rows: int64 [P], rows of the batch.
        owners: int64 [P], the sum that each row is part of: 0 to ``count - 1``.
        count: Number of sums.
    """

    def __init__(self, rows: Tensor, owners: Tensor, count: int) -> None:
        self._rows = rows
        self._owners = owners
        self._count = count
        self._sums: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        """Add the rows of hidden states, [T, hidden size]."""
        self._sums = torch.zeros(self._count, hidden.shape[1], dtype=torch.float64, device=hidden.device)
        for start in range(0, len(self._rows), _PIECE):
            rows, owners = (each[start : start + _PIECE] for each in (self._rows, self._owners))
            self._sums.index_add_(0, owners, hidden[rows].double())

    def sums(self) -> list[list[float]]:
        """[count][hidden size], on the host."""
        assert self._sums is not None, "the pass has not computed hidden states"
        values: list[list[float]] = self._sums.tolist()
        return values
