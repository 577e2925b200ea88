"""Inputs of products with quantized matrices: rows in int8, with a scale for each block of 32 columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import float32, int8, int32, int64, njit, prange, void
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.formats.coded_rows import BLOCK, Coding
from megatron_runtime.model.kernels.block_rounding import largest_bits, round_to_bytes
from megatron_runtime.model.kernels.compiled import address, array_at, compile_kernel, element, even_shares
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.recording import Kernel, empty_array
from megatron_runtime.model.kernels.row_kernels import WORTH_SHARING

TILE = 4
"""Rows that are multiplied together."""


@dataclass(frozen=True)
class CodedInputs:
    """Rows in tiles of four; the last rows are in a tile of two and one of one, as needed.

    The arrays are flat. In each, the numbers of a tile are together: by block, then by row, then by the dimensions
    below.
    """

    rows: int
    codes: NDArray[np.int8]
    """[BLOCK], from -127 to 127."""
    scales: NDArray[np.float32]
    """One. NaN for a block with a number that isn't finite."""
    starts: NDArray[np.int32]
    """[groups]: minus the offset of the matrix's codes times the sum of ``codes``."""
    sums: NDArray[np.float32]
    """The sum of ``codes`` times the scale."""


def code_inputs(inputs: Tensor, coding: Coding) -> CodedInputs:
    """Round the rows of ``inputs``, [T, columns], for a matrix of ``coding``; the columns are whole blocks."""
    rows, columns = inputs.shape
    blocks, groups = columns // BLOCK, BLOCK // coding.group
    coded = CodedInputs(
        rows,
        empty_array(rows * columns, np.int8),
        empty_array(rows * blocks, np.float32),
        empty_array(rows * blocks * groups, np.int32),
        empty_array(rows * blocks, np.float32),
    )
    kernel = _code_kernel(inputs.dtype is torch.bfloat16, inputs.numel() >= WORTH_SHARING)
    arrays = (coded.codes, coded.scales, coded.starts, coded.sums)
    given = inputs.contiguous()
    kernel(address(given), rows, columns, *arrays, groups, coding.offset, even_shares(-(-rows // TILE)))
    return coded


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernels for a dtype now, so that the first request does not wait for it."""
    for parallel in (False, True):
        _code_kernel(dtype is torch.bfloat16, parallel)


@njit(inline="always")
def tile_rows(left: Any) -> Any:
    """Rows of the next tile when so many are left; for compiled code."""
    return TILE if left >= TILE else min(left, 2)


@kernel_factory
def _code_kernel(narrow: bool, parallel: bool) -> Kernel:
    kind = element(narrow)

    def code(
        given: Any, height: Any, columns: Any, codes: Any, scales: Any, starts: Any, sums: Any, groups: Any,
        offset: Any, shares: Any,
    ) -> None:  # fmt: skip
        for share in prange(len(shares) - 1):
            inputs = array_at(given, (height, columns), kind)
            first, last = shares[share] * TILE, min(shares[share + 1] * TILE, height)
            while first < last:
                rows = tile_rows(last - first)
                for row in range(rows):
                    code_row(inputs, codes, scales, starts, sums, groups, offset, first, rows, row)
                first += rows

    floats = float32[::1]
    signature = void(int64, int64, int64, int8[::1], floats, int32[::1], floats, int64, int64, int64[::1])
    return compile_kernel(code, signature, parallel=parallel, fast=False)


@njit(inline="always")
def code_row(
    inputs: Any,
    codes: Any,
    scales: Any,
    starts: Any,
    sums: Any,
    groups: Any,
    offset: Any,
    first: Any,
    rows: Any,
    row: Any,
) -> None:
    """In compiled code: one row of the tile that begins with the row ``first``."""
    blocks = inputs.shape[1] // BLOCK
    half = BLOCK // 2
    for block in range(blocks):
        near = inputs.ctypes.data + ((first + row) * inputs.shape[1] + block * BLOCK) * inputs.itemsize
        far = near + half * inputs.itemsize
        bound = np.uint32(max(largest_bits(inputs, near), largest_bits(inputs, far))).view(np.float32)
        inverse, scale = np.float32(0), np.float32(0)
        if bound >= np.float32(1e-30):
            inverse, scale = np.float32(127) / bound, bound / np.float32(127)
        if not np.isfinite(bound):
            inverse, scale = np.float32(0), np.float32(np.nan)
        place = first * blocks + block * rows + row
        to = codes.ctypes.data + place * BLOCK
        left, right = round_to_bytes(inputs, near, inverse, to), round_to_bytes(inputs, far, inverse, to + half)
        if groups == 1:
            starts[place] = -offset * (left + right)
        else:
            starts[place * 2], starts[place * 2 + 1] = -offset * left, -offset * right
        scales[place] = scale
        sums[place] = scale * np.float32(left + right)
