"""Sampling on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.gpu.launch import launch, power_of_two
from megatron_runtime.gpu.sampling_kernels import finish_race, race_tokens

PART = 4096
"""Tokens of a program. Fixed, although the result does not depend on it: each token's score is its own."""
WARPS = 8


@dataclass(frozen=True)
class Race:
    """The rows of logits to sample, and their parameters; all on the device of the logits."""

    rows: Tensor
    """int64 [R], rows of the logits."""
    top: Tensor
    """float32 [R], subtracted from the logits."""
    temperature: Tensor
    """float32 [R], divides the difference."""
    least: Tensor
    """float32 [R], excludes tokens whose scaled logit is lower."""
    low: Tensor
    """int32 [R], the lower halves of the keys of the noise."""
    high: Tensor
    """int32 [R], the upper halves."""


def gumbel_max(logits: Tensor, race: Race, *, block: int, stream: int) -> Tensor:
    """The tokens with the largest sum of scaled logit and Gumbel noise: int64 [R]. Two launches, and no wait.

    Args:
        logits: float32 [S, vocab], rows contiguous.
        race: The rows.
        block: Tokens per block of the noise, a power of two.
        stream: Distinguishes the hash of the place in a block.
    """
    count, vocabulary = len(race.rows), logits.shape[1]
    parts = -(-vocabulary // PART)
    best = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    launch(
        race_tokens,
        (count, parts),
        (
            *(best, places, logits, race.rows, race.top, race.temperature, race.least, race.low, race.high),
            *(vocabulary, logits.stride(0), parts),
        ),
        PART=PART,
        BLOCK=block,
        STREAM=stream,
        num_warps=WARPS,
    )
    launch(finish_race, (count,), (tokens, best, places, parts), PARTS=max(power_of_two(parts), 2))
    return tokens


def use_kernels(vocabulary: int, device: torch.device) -> None:
    """Launch each kernel once, so that it is compiled."""
    row = {name: torch.ones(1, device=device) for name in ("top", "temperature", "least")}
    keys = {name: torch.zeros(1, dtype=torch.int32, device=device) for name in ("low", "high")}
    race = Race(rows=torch.zeros(1, dtype=torch.int64, device=device), **row, **keys)
    gumbel_max(torch.zeros(1, vocabulary, device=device), race, block=32, stream=0x5BD1E995)
