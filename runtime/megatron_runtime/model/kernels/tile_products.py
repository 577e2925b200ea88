"""Products with matrices in bfloat16 by the tiles of Intel AMX, for any number of rows.

oneDNN's kernels for tiles add in an order that depends on the number of rows. These add channel by channel, so that
the bits of a row depend on no other row, and use a panel of the matrix for many rows while it is in the cache.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import int64, prange, uint8, uint16, void
from torch import Tensor

from megatron_runtime.cpu_features import has_bfloat16_tiles
from megatron_runtime.model.kernels.compiled import as_array, compile_kernel, even_shares
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.matrix_panels import fill_panels, pad_columns
from megatron_runtime.model.kernels.panel_rows import pad_rows, write_products
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.threads import can_share_threads
from megatron_runtime.model.kernels.tile_instructions import (
    BLOCK,
    STEP,
    STEP_BYTES,
    TILE,
    TILE_BYTES,
    begin_tiles,
    configuration,
    end_tiles,
    multiply_tiles,
)
from megatron_runtime.model.kernels.vector_instructions import LINE_BYTES

logger = logging.getLogger(__name__)

_CACHED_BYTES = 1 << 20
"""Bytes of the inputs that are multiplied with all panels before the next ones: a part of a second-level cache."""
_SYSTEM_CALL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
"""arch_prctl on x86-64, ARCH_REQ_XCOMP_PERM, and the component XTILEDATA."""


@cache
def can_use_tiles() -> bool:
    """Whether this process may use AMX with bfloat16. Linux has to allow the memory that a thread's tiles take.

    Products on a single thread would be slower than those of oneDNN.
    """
    if not has_bfloat16_tiles() or not can_share_threads():
        return False
    if ctypes.CDLL(None, use_errno=True).syscall(_SYSTEM_CALL, _REQUEST, _TILE_DATA):
        logger.warning("the operating system does not allow AMX (error %d): products are slower", ctypes.get_errno())
        return False
    return True


def pack(matrix: Tensor) -> Tensor:
    """The panels of a matrix in bfloat16 [out, in]: [panels, steps, 2, TILE, TILE, 2], padded with zeros.

    The last three dimensions are pairs of channels, columns, and the channels of a pair.
    """
    wide = pad_columns(matrix, STEP)
    panels = wide.new_empty(-(-len(wide) // BLOCK), wide.shape[1] // STEP, 2, TILE, TILE, 2)
    fill_panels(panels.permute(0, 2, 4, 1, 3, 5), wide, BLOCK)
    return panels


def unpack(panels: Tensor, height: int, width: int) -> Tensor:
    """The matrix [height, width] of `pack`."""
    padded = panels.permute(0, 2, 4, 1, 3, 5).reshape(len(panels) * BLOCK, -1)
    return padded[:height, :width].contiguous()


def multiply(inputs: Tensor, panels: Tensor, bias: Tensor | None, height: int) -> Tensor:
    """``x W^T + b`` in bfloat16: [T, in] to [T, height]. The sums are float32, and rounded once.

    Args:
        inputs: [T, in], contiguous.
        panels: Those of `pack`.
        bias: [height], or None.
        height: Rows of the matrix without padding.
    """
    outputs = inputs.new_empty(len(inputs), height)
    if not len(inputs):
        return outputs
    steps = panels.shape[1]
    blocks = min(max(_CACHED_BYTES // (steps * TILE_BYTES * 2), 1), -(-len(inputs) // BLOCK))
    added = as_array(outputs.new_empty(0) if bias is None else bias)
    shares = even_shares(len(panels))
    tables = as_array(inputs), as_array(panels.view(-1)), added, as_array(outputs), _CONFIGURATION
    _product_kernel()(*tables, steps, blocks * BLOCK, shares)
    return outputs


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernel for a dtype now, so that the first request does not wait for it."""
    if dtype is torch.bfloat16 and can_use_tiles():
        _product_kernel()


_CONFIGURATION = configuration()


@kernel_factory
def _product_kernel() -> Kernel:
    def run(
        inputs: Any,
        panels: Any,
        bias: Any,
        outputs: Any,
        configuration: Any,
        steps: Any,
        together: Any,
        shares: Any,
    ) -> None:
        rows = len(inputs)
        # Rows at distances of whole pages would compete for the same lines of a cache.
        row_bytes = steps * STEP_BYTES + LINE_BYTES
        for share in prange(len(shares) - 1):
            begin_tiles(configuration.ctypes.data)
            products = np.empty((BLOCK, BLOCK), np.float32)
            padded = np.empty((together, row_bytes // 2), np.uint16)
            for begin in range(0, rows, together):
                end = min(begin + together, rows)
                pad_rows(inputs, begin, end, padded, TILE)
                for panel in range(shares[share], shares[share + 1]):
                    w = panels.ctypes.data + panel * steps * 2 * TILE_BYTES
                    for first in range(begin, end, BLOCK):
                        x = padded.ctypes.data + (first - begin) * row_bytes
                        if end - first > TILE:
                            multiply_tiles(2, steps, x, row_bytes, w, products.ctypes.data)
                        else:
                            multiply_tiles(1, steps, x, row_bytes, w, products.ctypes.data)
                        write_products(products, bias, outputs, first, min(BLOCK, end - first), panel * BLOCK)
            end_tiles()

    matrix, vector = uint16[:, ::1], uint16[::1]
    signature = void(matrix, vector, vector, matrix, uint8[::1], int64, int64, int64[::1])
    return compile_kernel(run, signature, fast=False)
