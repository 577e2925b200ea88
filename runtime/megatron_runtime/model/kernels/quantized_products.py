"""Products of rows with quantized matrices, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import float32, int8, int32, int64, njit, prange, uint8, uint16, void
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.formats.coded_rows import BLOCK, Coding
from megatron_runtime.model.kernels import coded_inputs
from megatron_runtime.model.kernels.coded_inputs import TILE, CodedInputs, code_row, tile_rows
from megatron_runtime.model.kernels.compiled import (
    KINDS,
    address,
    array_at,
    compile_kernel,
    element,
    even_shares,
    narrowed,
    widen,
)
from megatron_runtime.model.kernels.kernel_compiler import Kernel, kernel_factory
from megatron_runtime.model.kernels.panel_products import PANEL, Packing, multiply_panel

_CACHED_BYTES = 1 << 19
"""Bytes of the inputs that are multiplied with all panels before the next ones: half of a second-level cache."""

Array = NDArray[Any]


def multiply(
    inputs: CodedInputs,
    coding: Coding,
    panels: tuple[Array, Array, Array],
    bias: Tensor | None,
    outputs: Tensor,
    columns: range,
) -> None:
    """Multiply coded inputs by a matrix: a row's bits do not depend on the others.

    Args:
        inputs: For the same coding.
        coding: Of the matrix.
        panels: Of `multiply_panel`, each flat: codes (uint8), scales and mins (both float16, as uint16).
        bias: Is added before the rounding; [rows of the matrix], of the type of ``outputs``.
        outputs: [T, any], float32 or bfloat16, contiguous.
        columns: Of ``outputs``, which are written: one for each row of the matrix.
    """
    if not inputs.rows:
        return
    narrow = outputs.dtype is torch.bfloat16
    added = 0 if bias is None else address(bias)
    blocks = len(inputs.scales) // inputs.rows
    tiles = max(_CACHED_BYTES // (blocks * BLOCK * TILE), 1)
    shares = even_shares(-(-len(columns) // PANEL))
    kernel = _product_kernel(Packing.of(coding), narrow)
    arrays = (inputs.codes, inputs.scales, inputs.starts, inputs.sums)
    place = (*outputs.shape, columns.start, len(columns))
    kernel(*panels, *arrays, address(outputs), added, *place, blocks, tiles * TILE, shares)


def multiply_row(
    inputs: Tensor,
    coding: Coding,
    panels: tuple[Array, Array, Array],
    bias: Tensor | None,
    outputs: Tensor,
    columns: range,
) -> None:
    """`multiply` for inputs of one row, [1, columns], contiguous, which each thread codes for itself. Another kernel
    for that would take longer, above all because threads fall asleep between two kernels. The bits are the same.
    """
    kernel = _row_kernel(Packing.of(coding), coding.offset, outputs.dtype is torch.bfloat16)
    added = 0 if bias is None else address(bias)
    place = (outputs.shape[1], columns.start, len(columns), inputs.shape[1] // BLOCK)
    kernel(*panels, address(inputs), address(outputs), added, *place, even_shares(-(-len(columns) // PANEL)))


def prepare(coding: Coding, dtype: torch.dtype) -> None:
    """Compile the kernels for a coding and a dtype now, so that the first request does not wait for them."""
    if dtype in KINDS:
        coded_inputs.prepare(dtype)
        _product_kernel(Packing.of(coding), dtype is torch.bfloat16)
        _row_kernel(Packing.of(coding), coding.offset, dtype is torch.bfloat16)


@njit(inline="always")
def _write(
    products: Any, bias: Any, outputs: Any, first: Any, count: Any, column: Any, start: Any, height: Any
) -> None:
    """Write the products of ``count`` rows with the panel that begins at the row ``start``, without its padding."""
    width = min(PANEL, height - start)
    for row in range(count):
        to = outputs[first + row, column + start : column + start + width]
        if len(bias):
            for lane in range(width):
                to[lane] = narrowed(products[row, lane] + widen(bias[start + lane]), outputs)
        else:
            for lane in range(width):
                to[lane] = narrowed(products[row, lane], outputs)


@kernel_factory
def _product_kernel(packing: Packing, narrow: bool) -> Kernel:
    bits, group, has_mins = packing.bits, packing.group, int(packing.has_mins)
    panel_codes = PANEL * BLOCK * bits // 8
    groups, kind = packing.groups, element(narrow)

    def run(
        codes: Any, scales: Any, mins: Any, inputs: Any, input_scales: Any, starts: Any, sums: Any, outputs: Any,
        bias: Any, rows: Any, width: Any, column: Any, height: Any, blocks: Any, together: Any, shares: Any,
    ) -> None:  # fmt: skip
        for share in prange(len(shares) - 1):
            written, added = array_at(outputs, (rows, width), kind), array_at(bias, height if bias else 0, kind)
            products = np.empty((TILE, PANEL), np.float32)
            to = products.ctypes.data
            for begin in range(0, rows, together):
                end = min(begin + together, rows)
                for panel in range(shares[share], shares[share + 1]):
                    c = codes.ctypes.data + panel * blocks * panel_codes
                    s = scales.ctypes.data + panel * blocks * groups * PANEL * 2
                    m = mins.ctypes.data + panel * blocks * has_mins * PANEL * 2
                    first = begin
                    while first < end:
                        count, place = tile_rows(end - first), first * blocks
                        x, f = inputs.ctypes.data + place * BLOCK, input_scales.ctypes.data + place * 4
                        b, t = starts.ctypes.data + place * groups * 4, sums.ctypes.data + place * 4
                        if count == 4:
                            multiply_panel(bits, group, has_mins, 4, blocks, c, s, m, x, f, b, t, to)
                        elif count == 2:
                            multiply_panel(bits, group, has_mins, 2, blocks, c, s, m, x, f, b, t, to)
                        else:
                            multiply_panel(bits, group, has_mins, 1, blocks, c, s, m, x, f, b, t, to)
                        _write(products, added, written, first, count, column, panel * PANEL, height)
                        first += count

    floats = float32[::1]
    panels, inputs = (uint8[::1], uint16[::1], uint16[::1]), (int8[::1], floats, int32[::1], floats)
    signature = void(*panels, *inputs, *[int64] * 8, int64[::1])
    return compile_kernel(run, signature, fast=False)


@kernel_factory
def _row_kernel(packing: Packing, offset: int, narrow: bool) -> Kernel:
    bits, group, groups, has_mins = packing.bits, packing.group, packing.groups, int(packing.has_mins)
    panel_codes, kind = PANEL * BLOCK * bits // 8, element(narrow)

    def run(
        codes: Any, scales: Any, mins: Any, given: Any, outputs: Any, bias: Any, width: Any, column: Any, height: Any,
        blocks: Any, shares: Any,
    ) -> None:  # fmt: skip
        for share in prange(len(shares) - 1):
            inputs, written = array_at(given, (1, blocks * BLOCK), kind), array_at(outputs, (1, width), kind)
            added, products = array_at(bias, height if bias else 0, kind), np.empty((1, PANEL), np.float32)
            coded, factors = np.empty(blocks * BLOCK, np.int8), np.empty(blocks, np.float32)
            starts, sums = np.empty(blocks * groups, np.int32), np.empty(blocks, np.float32)
            code_row(inputs, coded, factors, starts, sums, groups, offset, 0, 1, 0)
            x, f = coded.ctypes.data, factors.ctypes.data
            b, t, to = starts.ctypes.data, sums.ctypes.data, products.ctypes.data
            for panel in range(shares[share], shares[share + 1]):
                c = codes.ctypes.data + panel * blocks * panel_codes
                s = scales.ctypes.data + panel * blocks * groups * PANEL * 2
                m = mins.ctypes.data + panel * blocks * has_mins * PANEL * 2
                multiply_panel(bits, group, has_mins, 1, blocks, c, s, m, x, f, b, t, to)
                _write(products, added, written, 0, 1, column, panel * PANEL, height)

    panels = uint8[::1], uint16[::1], uint16[::1]
    return compile_kernel(run, void(*panels, *[int64] * 7, int64[::1]), fast=False)
