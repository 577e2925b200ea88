"""Sums of hidden states over the tokens of each request, for embeddings."""

from __future__ import annotations

import torch
from torch import Tensor


class HiddenPool:
    """The sums of one pass, over some of its tokens.

    They are float64, so that the division of a prompt into passes changes them by less than a rounding of float32.

    Args:
        rows: int64 [P], rows of the batch.
        owners: int64 [P], the sum that each row is part of: 0 to ``count - 1``.
        count: Number of sums.
    """

    def __init__(self, rows: Tensor, owners: Tensor, count: int) -> None:
        self.rows = rows
        self._owners = owners
        self._count = count
        self._sums: Tensor | None = None

    def add(self, hidden: Tensor) -> None:
        """Add the hidden states of the rows, [P, hidden size]."""
        sums = torch.zeros(self._count, hidden.shape[1], dtype=torch.float64, device=hidden.device)
        self._sums = sums.index_add_(0, self._owners, hidden.double())

    def sums(self) -> list[list[float]]:
        """[count][hidden size], on the host."""
        assert self._sums is not None, "the pass has not computed hidden states"
        values: list[list[float]] = self._sums.tolist()
        return values
