"""Norms, activations, the lookup of embeddings, and rotations: single rows, one launch each."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_runtime.gpu.launch import launch, power_of_two
from megatron_runtime.gpu.row_kernels import (
    choose_tokens,
    gate_rows,
    look_up_rows,
    normalize_heads,
    normalize_projections,
    normalize_rows,
    turn_positions,
)

GATE_BLOCK = 1024
TOKEN_BLOCK = 256
CHANNELS_PER_WARP = 512
MOST_WARPS = 16
HEADS_TOGETHER = 8
"""Heads that one program normalizes."""
NORMS = {"rms": 0, "rms_plus_one": 1, "layer": 2}
"""The numbers of the kinds of `normalized`."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu_squared": 3}
"""The numbers of the activations of `activated`."""

Parameters = tuple[Tensor, Tensor | None]
"""Weight and bias of a norm."""


def normalize(rows: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """Normalize over the last dimension: [..., size] to [..., size], contiguous; ``kind`` is one of NORMS, and "layer"
    has a bias. Rows [T, size] may be parts of wider ones."""
    if rows.dim() != 2 or rows.stride(1) != 1:
        rows = rows.contiguous()
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _normalize(output, None, (rows, rows), 1.0, (weight, bias), None, eps, kind)
    return output


def add_and_normalize(
    rows: Tensor,
    updates: Tensor,
    multiplier: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
    of_updates: Parameters | None = None,
) -> tuple[Tensor, Tensor]:
    """``rows + multiplier * updates``, rounded, and its norm: both [T, size].

    ``of_updates``: of the norm of the updates, which is added instead of them.
    """
    rows, updates = rows.contiguous(), updates.contiguous()
    summed, output = torch.empty_like(rows), torch.empty_like(rows)
    _normalize(output, summed, (rows, updates), multiplier, (weight, bias), of_updates, eps, kind)
    return summed, output


def add_normalized(
    rows: Tensor, updates: Tensor, multiplier: float, weight: Tensor, bias: Tensor | None, eps: float, kind: str
) -> Tensor:
    """``rows + multiplier * norm(updates)``: [T, size]."""
    rows, updates = rows.contiguous(), updates.contiguous()
    summed = torch.empty_like(rows)
    _normalize(None, summed, (rows, updates), multiplier, None, (weight, bias), eps, kind)
    return summed


def _normalize(
    output: Tensor | None,
    summed: Tensor | None,
    given: tuple[Tensor, Tensor],
    multiplier: float,
    of_rows: Parameters | None,
    of_updates: Parameters | None,
    eps: float,
    kind: str,
) -> None:
    rows, updates = given
    parameters = [*(of_rows or of_updates or ()), *(of_updates or of_rows or ())]
    weight = parameters[0]
    assert weight is not None
    size = len(weight)
    launch(
        normalize_rows,
        (rows.numel() // size,),
        (
            *(rows if output is None else output, rows if summed is None else summed, rows, updates),
            *(weight if each is None else each for each in parameters),
            *(eps, float(multiplier), rows.stride(0) if rows.dim() == 2 else size),
        ),
        SIZE=size,
        SIZE_PAD=power_of_two(size),
        KIND=NORMS[kind],
        ADDS=summed is not None,
        NORMALIZES_UPDATES=of_updates is not None,
        NORMALIZES_ROWS=of_rows is not None,
        num_warps=warps_for(size),
    )


def normalize_projections_(
    rows: Tensor, sizes: tuple[int, int], weights: tuple[Tensor, Tensor], eps: float, kind: str
) -> None:
    """Normalize all queries of a token together, and all its keys, in place.

    Args:
        rows: [T, size], contiguous: queries, keys, and others.
        sizes: Channels of queries and of keys.
        weights: Of queries and of keys, one for each channel.
        eps: Added to the mean of the squares.
        kind: "rms" or "rms_plus_one".
    """
    queries, keys = sizes
    launch(
        normalize_projections,
        (len(rows), 2),
        (rows, *weights, eps),
        QUERIES=queries,
        QUERIES_PAD=power_of_two(queries),
        KEYS=keys,
        KEYS_PAD=power_of_two(keys),
        SIZE=rows.shape[1],
        KIND=NORMS[kind],
        num_warps=warps_for(max(sizes)),
    )


def normalize_heads_(
    heads: Tensor, counts: tuple[int, int], weights: tuple[Tensor, Tensor], eps: float, kind: str
) -> None:
    """Normalize queries and keys, each over its own channels, in place.

    Args:
        heads: [T, heads, width], contiguous: queries, keys, and others.
        counts: Numbers of queries and of keys.
        weights: Of queries and of keys, each [width].
        eps: Added to the mean of the squares.
        kind: "rms" or "rms_plus_one".
    """
    queries, keys = counts
    tokens, every, width = heads.shape
    launch(
        normalize_heads,
        (tokens, -(-(queries + keys) // HEADS_TOGETHER)),
        (heads, *weights, eps),
        QUERY_HEADS=queries,
        NORMALIZED=queries + keys,
        ALL=every,
        WIDTH=width,
        WIDTH_PAD=power_of_two(width),
        KIND=NORMS[kind],
        BLOCK_H=HEADS_TOGETHER,
    )


def gated(gates_and_values: Tensor, activation: str, clamped: tuple[float, float] | None = None) -> Tensor:
    """``activation(gate) * value``: [T, 2 * size], gates first, to [T, size].

    Args:
        gates_and_values: The rows.
        activation: One of ACTIVATIONS.
        clamped: Alpha and limit of `ClampedGate`, which replaces the activation.
    """
    count, size = len(gates_and_values), gates_and_values.shape[1] // 2
    output = gates_and_values.new_empty(count, size)
    alpha, limit = clamped or (0.0, 0.0)
    launch(
        gate_rows,
        (count, -(-size // GATE_BLOCK)),
        (output, gates_and_values, float(alpha), float(limit)),
        SIZE=size,
        BLOCK=GATE_BLOCK,
        ACTIVATION=ACTIVATIONS[activation],
        CLAMPED=clamped is not None,
    )
    return output


def look_up(
    tokens: Tensor,
    table: Tensor,
    first: int,
    multiplier: float,
    learned: tuple[Tensor, Tensor] | None,
    output: Tensor | None = None,
) -> Tensor:
    """Rows of a table, times ``multiplier``, for tokens [T]: [T, size]; zeros for tokens that the table lacks.

    Args:
        tokens: int64 [T].
        table: [tokens here, size].
        first: The token of the first row.
        multiplier: Of the rows.
        learned: A table by position, [positions, size], and positions, int64 [T]; its rows are added.
        output: Memory for the result, contiguous; None: it is allocated.
    """
    count, size = table.shape
    output = table.new_empty(len(tokens), size) if output is None else output
    by_position, positions = (table, tokens) if learned is None else learned
    block = min(power_of_two(size), GATE_BLOCK)
    launch(
        look_up_rows,
        (len(tokens), -(-size // block)),
        (output, tokens, positions, table, by_position, first, count, float(multiplier)),
        SIZE=size,
        BLOCK=block,
        HAS_POSITIONS=learned is not None,
        SCALED=multiplier != 1.0,
    )
    return output


def sampled_or_known(known: Tensor, sources: Tensor, sampled: Tensor) -> Tensor:
    """Tokens of the last pass at these places, or ``known`` where they are negative: int64 [T].

    Args:
        known: int64 [T].
        sources: int64 [T].
        sampled: int64 [S].
    """
    output = torch.empty_like(known)
    grid = (-(-len(known) // TOKEN_BLOCK),)
    launch(choose_tokens, grid, (output, known, sources, sampled, len(known)), BLOCK=TOKEN_BLOCK, num_warps=1)
    return output


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, magnitude: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [T, 1, 2 * n], for positions, int64 [T], and frequencies, float32 [n]."""
    half = len(frequencies)
    cosines, sines = (torch.empty(len(positions), 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    launch(
        turn_positions,
        (len(positions),),
        (cosines, sines, positions, frequencies, float(magnitude)),
        HALF=half,
        HALF_PAD=power_of_two(half),
        num_warps=1,
    )
    return cosines, sines


def warps_for(size: int) -> int:
    """Warps for a row: a power of two."""
    return min(max(power_of_two(size) // CHANNELS_PER_WARP, 1), MOST_WARPS)
