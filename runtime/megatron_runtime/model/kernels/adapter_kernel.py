"""Low-rank updates of single rows: each row has its own adapter, or none.

The sums of a row have one order, whatever the other rows are, and a row without an adapter is not touched. Up to ROWS
consecutive rows with the same adapter are computed together, so that its matrices are loaded once for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import float32, int32, int64, njit, prange, void
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.kernels.compiled import (
    KINDS,
    as_array,
    compile_kernel,
    even_shares,
    scalar,
    widen,
)
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.low_rank_products import TOGETHER, expand, project
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.vector_instructions import LANES

ROWS = 4
"""Rows with the same adapter that are computed together."""


def padded_rank(rank: int) -> int:
    """The number of rows of A, and columns of B, that are stored for a rank, with zeros after its own."""
    return -(-rank // TOGETHER) * TOGETHER


def padded_width(in_features: int) -> int:
    """The number of columns of A that are stored, with zeros after its own."""
    return -(-in_features // LANES) * LANES


def add_low_rank(
    inputs: Tensor, outputs: Tensor, slots: NDArray[np.int32], down: Tensor, up: Tensor, ranks: Tensor, scales: Tensor,
    bounds: NDArray[np.int64],
) -> None:  # fmt: skip
    """Add ``scale * B A x`` to the columns of each part of the outputs, in place.

    Args:
        inputs: [T, in], on the host, in one of KINDS, as ``outputs``, ``down`` and ``up``.
        outputs: [T, out].
        slots: [T], the adapter of each row; -1 for none.
        down: [slots, parts * R, `padded_width`], the matrices A, each with R rows for every part.
        up: [slots, R, out], the matrices B, transposed.
        ranks: int64 [slots, parts], the number of rows that a part uses of its R; each a `padded_rank`, as R.
        scales: float32 [slots, parts].
        bounds: [parts + 1], the first column of each part, and the end.
    """
    kernel = _low_rank_kernel(outputs.dtype is torch.bfloat16)
    floats = (as_array(each) for each in (inputs.contiguous(), outputs, down, up))
    kernel(*floats, slots, as_array(ranks), as_array(scales), bounds, even_shares(len(inputs)))


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernel for a dtype now, so that the first request does not wait for it."""
    if dtype in KINDS:
        _low_rank_kernel(dtype is torch.bfloat16)


@njit(inline="always")
def _rows_alike(slots: Any, first: Any, end: Any) -> Any:
    """ROWS if so many rows from the first on have the same adapter, else 1."""
    if first + ROWS > end:
        return 1
    for row in range(first + 1, first + ROWS):
        if slots[row] != slots[first]:
            return 1
    return ROWS


@njit(inline="always")
def _expand_part(factors: Any, up: Any, slot: Any, rank: Any, begin: Any, end: Any, count: Any, outputs: Any) -> None:
    """Add the rows of B, times ``factors``, float32 [rank, count], to the columns of a part in ``count`` outputs."""
    width = up.shape[2]
    column = begin
    while column < end:
        lanes = LANES if column + LANES <= end else 1
        matrix = up.ctypes.data + (slot * up.shape[1] * width + column) * up.itemsize
        to = outputs.ctypes.data + column * up.itemsize
        if count == ROWS:
            if lanes == LANES:
                expand(ROWS, LANES, up, rank, width, factors.ctypes.data, matrix, to)
            else:
                expand(ROWS, 1, up, rank, width, factors.ctypes.data, matrix, to)
        elif lanes == LANES:
            expand(1, LANES, up, rank, width, factors.ctypes.data, matrix, to)
        else:
            expand(1, 1, up, rank, width, factors.ctypes.data, matrix, to)
        column += lanes


@njit(inline="always")
def _project_part(
    inputs: Any, down: Any, slot: Any, first: Any, rank: Any, scale: Any, count: Any, products: Any
) -> None:
    """Scaled products of the inputs with ``rank`` rows of A from the first one on: float32 [rank, count]."""
    vectors = down.shape[2] // LANES
    for index in range(0, rank, TOGETHER):
        matrix = down.ctypes.data + (slot * down.shape[1] + first + index) * down.shape[2] * down.itemsize
        to = products.ctypes.data + index * count * 4
        if count == ROWS:
            project(ROWS, down, vectors, inputs.ctypes.data, matrix, to)
        else:
            project(1, down, vectors, inputs.ctypes.data, matrix, to)
    for place in range(rank * count):
        products[place] *= scale


@kernel_factory
def _low_rank_kernel(narrow: bool) -> Kernel:
    def add(
        inputs: Any, outputs: Any, down: Any, up: Any, slots: Any, ranks: Any, scales: Any, bounds: Any, shares: Any
    ) -> None:
        size, most = inputs.shape[1], up.shape[1]
        for share in prange(len(shares) - 1):
            given = np.zeros((ROWS, down.shape[2]), np.float32)
            products = np.empty(most * ROWS, np.float32)
            first = shares[share]
            while first < shares[share + 1]:
                slot, count = slots[first], _rows_alike(slots, first, shares[share + 1])
                # Adapters in later slots do not change this matrix.
                if 0 <= slot < len(ranks):
                    for row in range(count):
                        for channel in range(size):
                            given[row, channel] = widen(inputs[first + row, channel])
                    for part in range(len(bounds) - 1):
                        rank, begin, end = ranks[slot, part], bounds[part], bounds[part + 1]
                        if rank == 0:
                            continue
                        _project_part(given, down, slot, part * most, rank, scales[slot, part], count, products)
                        _expand_part(products, up, slot, rank, begin, end, count, outputs[first:])
                first += count

    stored = scalar(narrow)
    rows, stacks, bounds = stored[:, ::1], stored[:, :, ::1], int64[::1]
    return compile_kernel(
        add,
        void(rows, rows, stacks, stacks, int32[::1], int64[:, ::1], float32[:, ::1], bounds, bounds),
        fast=False,
    )
