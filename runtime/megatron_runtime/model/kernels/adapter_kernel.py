"""Low-rank updates of single rows: each row has its own adapter, or none.

The sums of a row have one order, whatever the other rows are, and a row without an adapter is not touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import float32, int32, int64, prange, void
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.kernels.compiled import (
    KINDS,
    as_array,
    compile_kernel,
    even_shares,
    narrowed,
    scalar,
    widen,
)
from megatron_runtime.model.kernels.kernel_compiler import Kernel, kernel_factory

TOGETHER = 4
"""Rows of A, and columns of B, that are multiplied together; ranks are multiples of it."""


def add_low_rank(
    inputs: Tensor, outputs: Tensor, slots: NDArray[np.int32], down: Tensor, up: Tensor, ranks: Tensor, scales: Tensor,
    bounds: NDArray[np.int64],
) -> None:  # fmt: skip
    """Add ``scale * B A x`` to the columns of each part of the outputs, in place.

    Args:
        inputs: [T, in], on the host, in one of KINDS, as ``outputs``, ``down`` and ``up``.
        outputs: [T, out].
        slots: [T], the adapter of each row; -1 for none.
        down: [slots, parts * R, in], the matrices A, each with R rows for every part.
        up: [slots, R, out], the matrices B, transposed.
        ranks: int64 [slots, parts], the number of rows that a part uses of its R; multiples of TOGETHER, as R.
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


@kernel_factory
def _low_rank_kernel(narrow: bool) -> Kernel:
    def add(
        inputs: Any, outputs: Any, down: Any, up: Any, slots: Any, ranks: Any, scales: Any, bounds: Any, shares: Any
    ) -> None:
        size, most = inputs.shape[1], up.shape[1]
        for share in prange(len(shares) - 1):
            sums = np.empty(outputs.shape[1], np.float32)
            for row in range(shares[share], shares[share + 1]):
                slot = slots[row]
                # Adapters in later slots do not change this matrix.
                if slot < 0 or slot >= len(ranks):
                    continue
                for part in range(len(bounds) - 1):
                    if ranks[slot, part] == 0:
                        continue
                    begin, end = bounds[part], bounds[part + 1]
                    for column in range(begin, end):
                        sums[column] = np.float32(0)
                    for index in range(0, ranks[slot, part], TOGETHER):
                        at, scale = part * most + index, scales[slot, part]
                        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                        for channel in range(size):
                            value = widen(inputs[row, channel])
                            a += value * widen(down[slot, at, channel])
                            b += value * widen(down[slot, at + 1, channel])
                            c += value * widen(down[slot, at + 2, channel])
                            d += value * widen(down[slot, at + 3, channel])
                        a, b, c, d = a * scale, b * scale, c * scale, d * scale
                        for column in range(begin, end):
                            sums[column] += (
                                a * widen(up[slot, index, column])
                                + b * widen(up[slot, index + 1, column])
                                + c * widen(up[slot, index + 2, column])
                                + d * widen(up[slot, index + 3, column])
                            )
                    for column in range(begin, end):
                        outputs[row, column] = narrowed(widen(outputs[row, column]) + sums[column], outputs)

    stored = scalar(narrow)
    rows, stacks, bounds = stored[:, ::1], stored[:, :, ::1], int64[::1]
    return compile_kernel(
        add, void(rows, rows, stacks, stacks, int32[::1], int64[:, ::1], float32[:, ::1], bounds, bounds)
    )
