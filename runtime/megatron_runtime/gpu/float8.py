"""Linear layers with matrices of 8-bit floating-point numbers, which stay so in the memory of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.gpu.float8_kernels import multiply_float8
from megatron_runtime.gpu.launch import capability, launch

TILE_ROWS = (16, 64, 128)
"""Inputs in a tile."""
FIXED_TILE_ROWS = 128
"""Where the bits of a row must not depend on the number of rows."""
TILES_TOGETHER = 8
"""Tiles of channels that programs visit with all rows before the next ones."""
FIRST_NATIVE = 89
"""The first compute capability with instructions that convert numbers of 8 bits."""
EXPONENTS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
"""Bits of the exponents."""


@dataclass(frozen=True)
class Float8Sizes:
    """Sizes of a product's tiles on one generation of GPUs; the tests compile with them and count registers."""

    rows: int
    channels: int
    """Rows of the matrix."""
    inner: int
    """Elements that are added at once."""
    warps: int
    stages: int


@dataclass(frozen=True)
class Float8Weights:
    """A matrix."""

    codes: Tensor
    """uint8 [out, in], the bits of the numbers."""
    scales: Tensor
    """float32 [groups, out]."""
    group: int
    """Columns that have one scale: a multiple of 16, or at least all of them."""
    exponent: int
    """Bits of the exponents: 4 or 5."""


def float8_sizes(capability: int, rows: int, channels: int, element_bytes: int, *, is_grouped: bool) -> Float8Sizes:
    """For `multiply_float8`, by compute capability, one of TILE_ROWS, and the rows of the matrix.

    Chosen so that nothing spills to local memory; how fast they are is unknown. With few rows a program has few
    channels, so that a narrow matrix is read by many. With scales for groups of columns (``is_grouped``), each program
    has two sums.
    """
    if element_bytes == 4:
        return Float8Sizes(rows=16 if rows == 16 else 32, channels=32, inner=32, warps=4, stages=2)
    if rows == 16:
        if channels < 8192:
            return Float8Sizes(rows=16, channels=32, inner=128, warps=2, stages=5)
        return Float8Sizes(rows=16, channels=64, inner=128, warps=4, stages=5)
    if rows == 64:
        return Float8Sizes(rows=64, channels=64, inner=64, warps=4, stages=4)
    if is_grouped:
        return Float8Sizes(rows=128, channels=64, inner=64, warps=4 if 90 <= capability < 120 else 8, stages=3)
    return Float8Sizes(rows=128, channels=128, inner=64, warps=8, stages=3)


def tile_rows(rows: int) -> int:
    """One of TILE_ROWS. The bits of a row may depend on the choice."""
    return next((each for each in TILE_ROWS if rows <= each), TILE_ROWS[-1])


def elements_at_once(most: int, group: int, size: int) -> int:
    """As many of the ``size`` elements of a sum as have one scale: a power of two, at most ``most``."""
    return min(most, group & -group) if group < size else most


def multiply(inputs: Tensor, weights: Float8Weights, bias: Tensor | None, *, rows_are_fixed: bool = False) -> Tensor:
    """``inputs W^T + bias``, by one launch: [T, in] to [T, out].

    Args:
        inputs: float32, float16 or bfloat16.
        weights: W.
        bias: [out], or None.
        rows_are_fixed: Whether the bits of a row must not depend on T.
    """
    inputs = inputs.contiguous()
    (count, size), channels = inputs.shape, len(weights.codes)
    arch, rows = capability(inputs), FIXED_TILE_ROWS if rows_are_fixed else tile_rows(count)
    sizes = float8_sizes(arch, rows, channels, inputs.element_size(), is_grouped=weights.group < size)
    output = inputs.new_empty(count, channels)
    launch(
        multiply_float8,
        (-(-count // sizes.rows) * -(-channels // sizes.channels),),
        (output, inputs, weights.codes, weights.scales, output if bias is None else bias, count),
        SIZE=size,
        CHANNELS=channels,
        GROUP=weights.group,
        EXPONENT=weights.exponent,
        IS_NATIVE=arch >= FIRST_NATIVE,
        BIASED=bias is not None,
        TOGETHER=TILES_TOGETHER,
        BLOCK_M=sizes.rows,
        BLOCK_N=sizes.channels,
        BLOCK_K=elements_at_once(sizes.inner, weights.group, size),
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return output


def use_kernels(inputs: Tensor, weights: Float8Weights, bias: Tensor | None) -> None:
    """Launch `multiply` on [1, in], for all numbers of rows."""
    for rows in TILE_ROWS:
        multiply(inputs.expand(rows, -1), weights, bias)
