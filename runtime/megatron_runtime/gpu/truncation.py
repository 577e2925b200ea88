"""The lowest logit that the truncations of a row keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.gpu.launch import launch, power_of_two
from megatron_runtime.gpu.truncation_kernels import (
    STATISTICS,
    collect_candidates,
    find_block_maxima,
    find_floors,
    truncate_rows,
)

PART = 4096
"""Tokens of a program that collects candidates."""
PART_WARPS = 8
VOCABULARY_BLOCK = 64
"""Tokens that count once when a row's floor is chosen."""
LIKELY_SHARE = 4
"""One of so many blocks has a candidate; most have one or two."""
CAPACITY = 64
"""Candidates of a part; there are about 20."""
BLOCK = 1024
"""Tokens that a program sees at once if it sees a whole row. Fixed: it determines the order of sums."""
WARPS = 16


@dataclass(frozen=True)
class Truncations:
    """Parameters of S rows; 0 excludes nothing."""

    top_n_sigma: Tensor
    """float32 [S]."""
    top_k: Tensor
    """int32 [S]."""
    top_p: Tensor
    """float32 [S]; 1 excludes nothing."""
    min_p: Tensor
    """float32 [S]."""


def least_kept(logits: Tensor, top: Tensor, temperature: Tensor, truncations: Truncations) -> Tensor:
    """The lowest scaled logit that each row keeps: float32 [S], minus infinity for all. Four launches.

    A scaled logit is (logit - top) / temperature. ``top`` is from `sampling.row_max`; rows at temperature 0 keep all.
    """
    (count, vocabulary), device = logits.shape, logits.device
    parts = -(-vocabulary // PART)
    blocks = parts * PART // VOCABULARY_BLOCK
    maxima = torch.empty(count, blocks, dtype=torch.float32, device=device)
    candidates = torch.empty(count, parts, CAPACITY, dtype=torch.float32, device=device)
    statistics = torch.empty(count, STATISTICS.value, parts, dtype=torch.float32, device=device)
    floors, least = torch.empty_like(top), torch.empty_like(top)
    parameters = (top, temperature, truncations.top_n_sigma, truncations.top_k, truncations.top_p)
    sizes, stride = {"VOCABULARY_BLOCK": VOCABULARY_BLOCK, "PART": PART, "num_warps": PART_WARPS}, logits.stride(0)
    launch(find_block_maxima, (count, parts), (maxima, logits, *parameters, vocabulary, stride, parts), **sizes)
    likely = max(-(-vocabulary // VOCABULARY_BLOCK) // LIKELY_SHARE, 1)
    launch(find_floors, (count,), (floors, maxima, *parameters, blocks, likely), BLOCK=BLOCK, num_warps=WARPS)
    launch(
        collect_candidates,
        (count, parts),
        (candidates, statistics, logits, floors, *parameters, vocabulary, stride, parts),
        CAPACITY=CAPACITY,
        **sizes,
    )
    launch(
        truncate_rows,
        (count,),
        (least, logits, candidates, statistics, floors, *parameters, truncations.min_p, vocabulary, stride, parts),
        PARTS=max(power_of_two(parts), 2),
        CAPACITY=CAPACITY,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return least
