"""Products of the rows of each head with the matrix of that head, for multi-head latent attention.

On a CPU they are compiled kernels, in which the order of a row's sums does not depend on the other rows. In a batched
product of PyTorch it may. On a GPU with kernels of attention, those of `gpu.latent_attention` replace both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import int64, njit, prange, void
from torch import Tensor

from megatron_runtime.model.kernels.compiled import KINDS, as_array, compile_kernel, narrowed, scalar, widen
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.row_kernels import has_cpu_row_kernels
from megatron_runtime.model.kernels.threads import kernel_threads

TILE = 8
"""Rows that are multiplied by a row of the matrix while that is in the first-level cache."""


def absorb(queries: Tensor, up: Tensor, latents: Tensor, multiplier: float = 1.0) -> None:
    """Multiply the queries of each head by the matrix that projects latents to its keys, and by ``multiplier``.

    The product of the result and a latent is that of the query and the key of that latent, times ``multiplier``.

    Args:
        queries: [T, heads, N + rotated], contiguous; only the first N channels are multiplied.
        up: [heads, N + V, rank]: of each head the rows that project to a key, then those that project to a value.
        latents: [T, heads or more, rotated + rank], contiguous; the last ``rank`` channels of the first ``heads`` rows
            of each token are written.
        multiplier: Of the results.
    """
    heads, rank = up.shape[0], up.shape[2]
    rotated = latents.shape[2] - rank
    width = queries.shape[2] - rotated
    if has_cpu_row_kernels(queries):
        kernel = _absorb_kernel(queries.dtype is torch.bfloat16)
        kernel(as_array(queries), as_array(up), as_array(latents), width, _shares(len(queries), heads))
        latents[:, :heads, rotated:] *= multiplier
        return
    _multiply(queries[..., :width], up[:, :width], latents[:, :heads, rotated:], multiplier)


def expand(seen: Tensor, up: Tensor, width: int) -> Tensor:
    """Project latents [T, heads, rank] to values [T, heads, width] by the last ``width`` rows of each head in ``up``.

    ``up`` is as in `absorb`.
    """
    values = seen.new_empty(len(seen), up.shape[0], width)
    if not has_cpu_row_kernels(seen):
        _multiply(seen, up[:, -width:].transpose(1, 2), values, 1.0)
        return values
    kernel = _expand_kernel(seen.dtype is torch.bfloat16)
    kernel(as_array(seen), as_array(up), as_array(values), _shares(len(seen), len(up)))
    return values


def _multiply(inputs: Tensor, matrices: Tensor, outputs: Tensor, multiplier: float) -> None:
    """Write the products of [T, heads, in] and [heads, in, out], times ``multiplier``, into ``outputs``."""
    target = outputs.transpose(0, 1)
    # Written in place: the kernels of libraries have a distance between the rows of a result.
    torch.baddbmm(target, inputs.transpose(0, 1), matrices, beta=0, alpha=multiplier, out=target)


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernels for a dtype now, so that the first request does not wait for it."""
    if dtype in KINDS:
        _absorb_kernel(dtype is torch.bfloat16)
        _expand_kernel(dtype is torch.bfloat16)


def _shares(rows: int, heads: int) -> Any:
    """Start of each thread's share of the pairs of a head and a tile of rows, and the end: int64 [threads + 1]."""
    threads = kernel_threads()
    return np.arange(threads + 1) * (-(-rows // TILE) * heads) // threads


@kernel_factory
def _absorb_kernel(narrow: bool) -> Kernel:
    def run(queries: Any, up: Any, latents: Any, width: int, shares: Any) -> None:
        tiles = -(-queries.shape[0] // TILE)
        for share in prange(len(shares) - 1):
            for item in range(shares[share], shares[share + 1]):
                _absorb_tile(queries, up, latents, width, item // tiles, item % tiles * TILE)

    rows = scalar(narrow)[:, :, ::1]
    return compile_kernel(run, void(rows, rows, rows, int64, int64[::1]))


@njit(inline="always")
def _absorb_tile(queries: Any, up: Any, latents: Any, width: int, head: int, first: int) -> None:
    count, rank = min(TILE, queries.shape[0] - first), up.shape[2]
    before = latents.shape[2] - rank
    sums = np.zeros((count, rank), np.float32)
    for channel in range(width):
        for row in range(count):
            factor = widen(queries[first + row, head, channel])
            for place in range(rank):
                sums[row, place] += factor * widen(up[head, channel, place])
    for row in range(count):
        for place in range(rank):
            latents[first + row, head, before + place] = narrowed(sums[row, place], latents)


@kernel_factory
def _expand_kernel(narrow: bool) -> Kernel:
    def run(seen: Any, up: Any, values: Any, shares: Any) -> None:
        tiles = -(-seen.shape[0] // TILE)
        for share in prange(len(shares) - 1):
            for item in range(shares[share], shares[share + 1]):
                _expand_tile(seen, up, values, item // tiles, item % tiles * TILE)

    rows = scalar(narrow)[:, :, ::1]
    return compile_kernel(run, void(rows, rows, rows, int64[::1]))


@njit(inline="always")
def _expand_tile(seen: Any, up: Any, values: Any, head: int, first: int) -> None:
    count, width = min(TILE, seen.shape[0] - first), values.shape[2]
    before = up.shape[1] - width
    for channel in range(width):
        for row in range(count):
            total = np.float32(0)
            for place in range(up.shape[2]):
                total += widen(seen[first + row, head, place]) * widen(up[head, before + channel, place])
            values[first + row, head, channel] = narrowed(total, values)
