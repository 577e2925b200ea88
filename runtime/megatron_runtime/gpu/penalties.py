"""The distinct tokens of running sequences with their counts on the device, and the penalties that depend on them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_runtime.gpu.launch import launch
from megatron_runtime.gpu.penalty_kernels import penalize_counted

BLOCK = 1024
"""Tokens that a program sees at once."""
WARPS = 8


class TokenCounts:
    """A list of distinct tokens, and their counts, for each of R rows.

    Args:
        num_rows: R.
        capacity: Most tokens of a list.
        device: Where they are.
    """

    def __init__(self, num_rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.entries = torch.empty(num_rows, capacity, 2, dtype=torch.int32, device=device)
        self.sizes = torch.empty(num_rows, dtype=torch.int32, device=device)
        self.no_tokens = torch.zeros(1, dtype=torch.int64, device=device)

    def write(self, places: Tensor, entries: Tensor) -> None:
        """Write N tokens and their counts, int32 [N, 2], to places int64 [N]: row * capacity + place in the list. One
        launch."""
        self.entries.view(-1, 2).index_copy_(0, places, entries)


def penalize(logits: Tensor, sampled: Tensor | None, numbers: Tensor, factors: Tensor, lists: TokenCounts) -> None:
    """Count the last token of each sequence, and penalize the logits after it, in place. One launch.

    Args:
        logits: float32 [S, vocab], rows contiguous.
        sampled: int64, the tokens of the last pass; None if ``numbers`` has no places of them.
        numbers: int32 [4, S], and
        factors: float64 [3, S], as in `penalize_counted`.
        lists: Those of the rows, which have room for one more token each.
    """
    count = len(logits)
    sampled = lists.no_tokens if sampled is None else sampled
    launch(
        penalize_counted,
        (count,),
        (logits, sampled, numbers, factors, lists.entries, lists.sizes, logits.stride(0), count, lists.capacity),
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,  # A fused product and difference would be rounded once.
    )


def use_kernels(vocabulary: int, device: torch.device) -> None:
    """Launch each kernel once, so that it is compiled."""
    logits, lists = torch.zeros(1, vocabulary, device=device), TokenCounts(1, 16, device)
    numbers, factors = (torch.zeros(count, 1, device=device) for count in (4, 3))
    penalize(logits, None, numbers.int() - 1, factors.double(), lists)
