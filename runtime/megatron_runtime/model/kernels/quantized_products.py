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
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.panel_products import PANEL, Packing, multiply_panel
from megatron_runtime.model.kernels.recording import Kernel

_CACHED_BYTES = 1 << 19
"""Bytes of the inputs that are multiplied with all panels before the next ones: half of a second-level cache."""

Array = NDArray[Any]


def multiply(
    inputs: CodedInputs | Tensor,
    coding: Coding,
    panels: tuple[Array, Array, Array],
    bias: Tensor | None,
    outputs: Tensor,
    columns: range,
) -> None:
    """Multiply inputs by a matrix: a row's bits do not depend on the others.

    Args:
        inputs: Coded for the same coding. Or a single row, [1, columns of the matrix], contiguous, which each thread
            codes for itself: another kernel for that takes longer, and threads fall asleep between two kernels.
        coding: Of the matrix.
        panels: Of `multiply_panel`, each flat: codes (uint8), scales and mins (both float16, as uint16).
        bias: Is added before the rounding; [rows of the matrix], of the type of ``outputs``.
        outputs: [T, any], float32 or bfloat16, contiguous.
        columns: Of ``outputs``, which are written: one for each row of the matrix.
    """
    packing, narrow = Packing.of(coding), outputs.dtype is torch.bfloat16
    places = address(outputs), 0 if bias is None else address(bias)
    written = outputs.shape[1], columns.start, len(columns)
    shares = even_shares(-(-len(columns) // PANEL))
    if isinstance(inputs, Tensor):
        kernel = _row_kernel(packing, coding.offset, narrow)
        kernel(*panels, address(inputs), *places, *written, inputs.shape[1] // BLOCK, shares)
    elif inputs.rows:
        blocks = len(inputs.scales) // inputs.rows
        tiles = max(_CACHED_BYTES // (blocks * BLOCK * TILE), 1)
        arrays = (inputs.codes, inputs.scales, inputs.starts, inputs.sums)
        kernel = _product_kernel(packing, narrow)
        kernel(*panels, *arrays, *places, inputs.rows, *written, blocks, tiles * TILE, shares)


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


@njit(inline="always")
def _panel_at(
    codes: Any, scales: Any, mins: Any, panel: Any, blocks: Any, bits: Any, groups: Any, has_mins: Any
) -> Any:
    """The addresses of the codes, scales and mins of a panel."""
    first = panel * blocks * PANEL
    c, s = codes.ctypes.data + first * BLOCK * bits // 8, scales.ctypes.data + first * groups * 2
    return c, s, mins.ctypes.data + first * has_mins * 2


@kernel_factory
def _product_kernel(packing: Packing, narrow: bool) -> Kernel:
    bits, group, has_mins = packing.bits, packing.group, int(packing.has_mins)
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
                    c, s, m = _panel_at(codes, scales, mins, panel, blocks, bits, groups, has_mins)
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
    kind = element(narrow)

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
            for panel in range(shares[share], shares[share + 1]):
                # In the loop, because numba releases an array after its last use, whatever its address is used for.
                x, f = coded.ctypes.data, factors.ctypes.data
                b, t, to = starts.ctypes.data, sums.ctypes.data, products.ctypes.data
                c, s, m = _panel_at(codes, scales, mins, panel, blocks, bits, groups, has_mins)
                multiply_panel(bits, group, has_mins, 1, blocks, c, s, m, x, f, b, t, to)
                _write(products, added, written, 0, 1, column, panel * PANEL, height)

    panels = uint8[::1], uint16[::1], uint16[::1]
    return compile_kernel(run, void(*panels, *[int64] * 7, int64[::1]), fast=False)
