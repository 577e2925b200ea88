"""Sizes of batches for the kernels of attention, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gpu_support.paged import PagedCase

from megatron_runtime.gpu.attention import SPLIT


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: contexts with their new tokens, heads on key heads, width and tokens of a block."""

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    width: int
    page: int
    window: int | None = None
    soft_cap: float | None = None
    turned: int | None = None
    """Rotated channels; None: all."""
    has_sinks: bool = False
    is_chunked: bool = False

    def case(self, dtype: torch.dtype) -> PagedCase:
        """Random values of these sizes."""
        return PagedCase.random(self.lengths, self.heads, self.width, self.page, dtype, turned=self.turned)

    def limits(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """The further arguments of `PagedCase.attend`: window, soft cap, sinks on the device, and chunks. Some of the
        sinks take most of the softmax."""
        sinks = torch.linspace(-3.0, 5.0, self.heads[0]).to(device) if self.has_sinks else None
        return self.window, self.soft_cap, sinks, self.is_chunked


DECODE = ((1, 1), (17, 1), (70, 1))
MIXED = ((40, 1), (33, 20), (5, 5))
LONGER = ((150, 9), (135, 1))
"""With a block of keys that all queries see, also with the largest blocks."""
SPLITS = ((SPLIT, 1), (SPLIT + 1, 1), (2 * SPLIT + 100, 1), (3, 1))
SHAPES = {
    "single tokens": Shape(DECODE, (4, 2), 64, 16),
    "single tokens, group of 3, width 80": Shape(DECODE, (6, 2), 80, 16),
    "single tokens, window within a split": Shape(((90, 1), (20, 1)), (2, 2), 96, 32, window=33),
    "prompts alone": Shape(((19, 19), (70, 37)), (4, 4), 64, 16),
    "prompts and single tokens": Shape(MIXED, (4, 2), 128, 16),
    "prompts, group of 4, width 80": Shape(LONGER, (8, 2), 80, 32),
    "prompts, group of 5, width 96": Shape(LONGER, (5, 1), 96, 32, soft_cap=5.0),
    "prompts, group of 17": Shape(LONGER, (17, 1), 32, 32),
    "windows": Shape(((70, 1), (66, 20)), (8, 1), 64, 16, window=13),
    "soft cap": Shape(MIXED, (2, 1), 32, 64, soft_cap=5.0),
    "soft cap and window": Shape(((75, 1), (40, 9)), (2, 1), 32, 256, window=20, soft_cap=5.0),
    "soft cap and window, width 64": Shape(((40, 1), (36, 9)), (2, 1), 64, 16, window=13, soft_cap=5.0),
    "width 256": Shape(((20, 1), (9, 9)), (2, 1), 256, 16),
    "width 256, several splits": Shape(((530, 1), (9, 9)), (2, 1), 256, 16),
    "half of the channels rotated": Shape(MIXED, (2, 1), 64, 8, turned=32),
    "sinks": Shape(MIXED, (6, 2), 64, 16, has_sinks=True),
    "sinks and windows": Shape(((70, 1), (66, 20), (3, 1)), (4, 2), 64, 16, window=13, has_sinks=True),
    "chunks": Shape(((70, 1), (66, 20), (65, 1), (40, 40)), (4, 2), 64, 16, window=13, is_chunked=True),
    "chunks and sinks": Shape(((64, 1), (70, 37)), (4, 2), 64, 16, window=32, is_chunked=True, has_sinks=True),
    "none rotated": Shape(((3, 1), (9, 4)), (2, 1), 64, 8, turned=0),
    "several splits": Shape(SPLITS, (2, 1), 64, 128),
    "several splits, window": Shape(SPLITS, (2, 1), 64, 128, window=600),
    "several splits, sinks": Shape(SPLITS, (2, 1), 64, 128, has_sinks=True),
    "several splits, chunks": Shape(SPLITS, (2, 1), 64, 128, window=700, is_chunked=True),
    "several splits, soft cap": Shape(SPLITS, (2, 1), 64, 128, soft_cap=1.0),
    "several splits, soft cap, window and sinks": Shape(
        SPLITS, (2, 1), 64, 128, window=600, soft_cap=1.0, has_sinks=True
    ),
}
