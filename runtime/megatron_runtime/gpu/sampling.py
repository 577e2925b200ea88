"""Sampling on the device: a fixed number of launches, and nothing that waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.gpu.launch import launch, power_of_two
from megatron_runtime.gpu.sampling_kernels import (
    edit_logits,
    exclude_tokens,
    finish_race,
    finish_scan,
    race_tokens,
    scan_rows,
)
from megatron_runtime.gpu.truncation import Truncations, least_kept

PART = 4096
"""Tokens of a program that sees a part of the vocabulary."""
WARPS = 8
EDIT_BLOCK = 256
NOISE_BLOCK = 32
"""Tokens with a common minimum of the noise, as in `engine.sampling.exponential_noise`."""
NOISE_STREAM = 0x5BD1E995
"""As there: distinguishes the hash of the place in a block."""
OPERATIONS = {"add": 0, "penalize": 1, "subtract": 2}
"""The numbers of the operations of `edit_logits`."""


@dataclass(frozen=True)
class SampledRows:
    """Parameters of S rows, on the device of the logits."""

    temperature: Tensor
    """float32 [S]; 0: the most likely token."""
    low: Tensor
    """int32 [S], the lower halves of the keys of the noise."""
    high: Tensor
    """int32 [S], the upper halves."""
    truncations: Truncations | None
    """None if no row is truncated."""


def edit(logits: Tensor, places: Tensor, values: Tensor, operation: str) -> None:
    """Change some logits in place. One launch.

    Args:
        logits: float32 [S, vocab], contiguous.
        places: int64 [N], distinct: row * vocab + token.
        values: float32 [N].
        operation: One of OPERATIONS.
    """
    grid = (-(-len(places) // EDIT_BLOCK),)
    constants = {"OPERATION": OPERATIONS[operation], "BLOCK": EDIT_BLOCK}
    launch(edit_logits, grid, (logits, places, values, len(places)), **constants, num_warps=4)


def exclude(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Exclude the tokens whose bits are set, in place. One launch.

    Args:
        logits: float32 [S, vocab], rows contiguous.
        rows: int64 [G], distinct.
        masks: int32 [G, vocab / 32], the first token in the lowest bit of the first word.
    """
    vocabulary = logits.shape[1]
    launch(
        exclude_tokens,
        (len(rows), -(-vocabulary // PART)),
        (logits, rows, masks, vocabulary, logits.stride(0), masks.stride(0)),
        PART=PART,
        num_warps=WARPS,
    )


def sample(logits: Tensor, rows: SampledRows) -> Tensor:
    """One token per row: int64 [S]; -1 where the row has a NaN or no finite maximum.

    Four launches, and four more for truncations. The tokens of rows that are all greedy are those of `row_max`.

    Args:
        logits: float32 [S, vocab], rows contiguous.
        rows: Their parameters.
    """
    top, tokens = row_max(logits)
    least = top if rows.truncations is None else least_kept(logits, top, rows.temperature, rows.truncations)
    _gumbel_max(tokens, logits, top, least, rows)
    return tokens


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row, [S], and the first token that has it, int64 [S]; NaN and -1 where the row has a NaN or
    no finite maximum. Two launches."""
    (count, vocabulary), device = logits.shape, logits.device
    parts = -(-vocabulary // PART)
    best, places = _parts(logits, parts)
    launch(
        scan_rows,
        (count, parts),
        (best, places, logits, vocabulary, logits.stride(0), parts),
        PART=PART,
        num_warps=WARPS,
    )
    top = torch.empty(count, dtype=torch.float32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    launch(finish_scan, (count,), (top, tokens, best, places, parts), PARTS=_padded(parts), num_warps=1)
    return top, tokens


def _gumbel_max(tokens: Tensor, logits: Tensor, top: Tensor, least: Tensor, rows: SampledRows) -> None:
    """Replace the tokens of the rows that are not greedy. Two launches."""
    count, vocabulary = logits.shape
    parts = -(-vocabulary // PART)
    best, places = _parts(logits, parts)
    launch(
        race_tokens,
        (count, parts),
        (
            *(best, places, logits, top, rows.temperature, least, rows.low, rows.high),
            *(vocabulary, logits.stride(0), parts),
        ),
        PART=PART,
        BLOCK=NOISE_BLOCK,
        STREAM=NOISE_STREAM,
        TRUNCATED=rows.truncations is not None,
        num_warps=WARPS,
    )
    results = (tokens, best, places, top, rows.temperature, parts)
    launch(finish_race, (count,), results, PARTS=_padded(parts), num_warps=1)


def _parts(logits: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Memory for a value and a token of each part of each row."""
    best = torch.empty(len(logits), parts, dtype=torch.float32, device=logits.device)
    return best, torch.empty(len(logits), parts, dtype=torch.int32, device=logits.device)


def _padded(parts: int) -> int:
    return max(power_of_two(parts), 2)


def use_kernels(vocabulary: int, device: torch.device) -> None:
    """Launch each kernel once, so that it is compiled."""
    logits, one = torch.zeros(1, vocabulary, device=device), torch.ones(1, device=device)
    number = torch.zeros(1, dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    for truncations in (None, Truncations(one, number + 1, one / 2, one / 2)):
        sample(logits, SampledRows(one, number, number, truncations))
    for operation in OPERATIONS:
        edit(logits, row, one, operation)
    words = torch.zeros(1, -(-vocabulary // 32), dtype=torch.int32, device=device)
    exclude(logits, row, words)
