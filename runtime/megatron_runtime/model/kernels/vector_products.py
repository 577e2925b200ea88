"""Products with matrices in float32 by vectors of AVX2 or AVX-512, and in bfloat16 by those of AVX-512, of any rows.

The bits of a row depend on no other row. While some rows are multiplied with a panel of the matrix, a part of the next
panel is prefetched, an equal one each time: with few rows, the time is that of reading the matrix, and with more, the
memory would be too slow for all of a panel at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import int64, prange, void
from torch import Tensor

from megatron_runtime.cpu_features import has_bfloat16_vectors, has_vectors
from megatron_runtime.model.kernels.compiled import address, array_at, compile_kernel, element, even_shares
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.matrix_panels import fill_panels, pad_columns
from megatron_runtime.model.kernels.panel_rows import pad_rows, write_products
from megatron_runtime.model.kernels.product_instructions import COLUMNS, ROWS, WORD_BYTES, multiply_words
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.threads import can_share_threads, kernel_threads
from megatron_runtime.model.kernels.vector_instructions import LINE_BYTES

_CACHED_BYTES = 1 << 19
"""Bytes of the inputs that are multiplied with all panels before the next ones: a part of a second-level cache."""
_SHARES = 4
"""Parts of the work for each thread, at least, if there are so many."""
_CLOSE_BYTES = 1 << 10
"""Rows at multiples of this distance would compete for the same lines of a cache."""
WORTH_SHARING = 1 << 18
"""Number of multiplications above which a second thread pays off."""


def can_use_vectors(dtype: torch.dtype) -> bool:
    """Whether this processor has the instructions. Products on a single thread would be slower than those of oneDNN."""
    has_instructions = {torch.float32: has_vectors, torch.bfloat16: has_bfloat16_vectors}
    return dtype in has_instructions and has_instructions[dtype]() and can_share_threads()


def pack(matrix: Tensor) -> Tensor:
    """The panels of a matrix [out, in]: [panels, words, COLUMNS * channels], padded with zeros.

    A word has one channel in float32, and two in bfloat16.
    """
    words = pad_columns(matrix, WORD_BYTES // matrix.element_size()).view(torch.int32)
    panels = words.new_empty(-(-len(words) // COLUMNS), words.shape[1], COLUMNS)
    fill_panels(panels.transpose(1, 2), words, COLUMNS)
    return panels.view(matrix.dtype)


def unpack(panels: Tensor, height: int, width: int) -> Tensor:
    """The matrix [height, width] of `pack`."""
    words = panels.view(torch.int32).transpose(1, 2).flatten()
    padded = words.view(panels.dtype).view(len(panels) * COLUMNS, -1)
    return padded[:height, :width].contiguous()


def multiply(inputs: Tensor, panels: Tensor, bias: Tensor | None, height: int) -> Tensor:
    """``x W^T + b``: [T, in] to [T, height]. The sums are float32, and rounded once.

    Args:
        inputs: [T, in], contiguous, of the matrix's type.
        panels: Those of `pack`.
        bias: [height], or None.
        height: Rows of the matrix without padding.
    """
    assert inputs.dtype is panels.dtype
    rows, width = inputs.shape
    outputs = inputs.new_empty(rows, height)
    if not rows:
        return outputs
    count, words = panels.shape[:2]
    together = _rows_together(rows, words * WORD_BYTES, count, kernel_threads(), _CACHED_BYTES)
    row_bytes = width * inputs.element_size()
    is_copied = row_bytes % _CLOSE_BYTES == 0 or row_bytes < words * WORD_BYTES
    kernel = _product_kernel(inputs.dtype is torch.bfloat16, rows * words * count * COLUMNS >= WORTH_SHARING)
    places = address(inputs), address(panels), 0 if bias is None else address(bias), address(outputs)
    shares = even_shares(count * -(-rows // together))
    kernel(*places, rows, width, height, count, words, together, int(is_copied), shares)
    return outputs


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernels for a dtype now, so that the first request does not wait for them."""
    if can_use_vectors(dtype):
        for parallel in (False, True):
            _product_kernel(dtype is torch.bfloat16, parallel)


@lru_cache(4096)
def _rows_together(rows: int, row_bytes: int, panels: int, threads: int, cached_bytes: int) -> int:
    """Rows that are multiplied with all panels before the next ones: as many as stay in the cache, and leave enough
    parts of the work for the threads."""
    cached, shared = cached_bytes // row_bytes, rows * panels // (_SHARES * threads)
    blocks = -(-rows // (max(min(cached, shared) // ROWS, 1) * ROWS))
    return -(-rows // blocks)  # blocks of equal size, since threads have equal numbers of them


@kernel_factory
def _product_kernel(narrow: bool, parallel: bool) -> Kernel:
    kind, item = element(narrow), 2 if narrow else 4

    def run(
        inputs: Any, panels: Any, bias: Any, outputs: Any, rows: Any, width: Any, height: Any, count: Any, words: Any,
        together: Any, is_copied: Any, shares: Any,
    ) -> None:  # fmt: skip
        given_bytes, panel_bytes = width * item, words * COLUMNS * WORD_BYTES
        for share in prange(len(shares) - 1):
            given, written = array_at(inputs, (rows, width), kind), array_at(outputs, (rows, height), kind)
            added = array_at(bias, height if bias else 0, kind)
            products = np.empty((ROWS, COLUMNS), np.float32)
            row_bytes = words * WORD_BYTES + LINE_BYTES if is_copied else given_bytes
            padded = np.empty((together if is_copied else 0, row_bytes // item), kind)
            held = -1
            for part in range(shares[share], shares[share + 1]):
                block, panel = part // count, part % count
                begin = block * together
                end = min(begin + together, rows)
                x = inputs + begin * given_bytes
                if is_copied:
                    if block != held:
                        pad_rows(given, begin, end, padded, 1)
                        held = block
                    x = np.int64(padded.ctypes.data)
                w = panels + panel * panel_bytes
                has_next = panel + 1 < count and part + 1 < shares[share + 1]
                following = w + panel_bytes if has_next else w
                turns = (end - begin + ROWS - 1) // ROWS
                size = (end - begin + turns - 1) // turns
                stride = (COLUMNS * WORD_BYTES + turns - 1) // turns
                for turn in range(turns):
                    first = turn * size
                    number = min(size, end - begin - first)
                    ahead, second = following + turn * stride * words, LINE_BYTES if turns == 1 else 0
                    at, to = x + first * row_bytes, products.ctypes.data
                    multiply_words(given, number, words, at, row_bytes, w, ahead, stride, second, to)
                    write_products(products, added, written, begin + first, number, panel * COLUMNS)

    signature = void(*[int64] * 11, int64[::1])
    return compile_kernel(run, signature, parallel=parallel, fast=False)
