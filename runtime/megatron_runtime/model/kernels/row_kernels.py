"""Operations on single rows, with one pass over the memory instead of several PyTorch operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import float32, int64, njit, prange, void
from torch import Tensor

from megatron_runtime.model.kernels.compiled import (
    KINDS,
    address,
    array_at,
    as_array,
    compile_kernel,
    element,
    even_shares,
    exponential,
    logistic,
    narrowed,
    rounded,
    scalar,
    widen,
)
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.triton_support import has_triton

GPU_KINDS = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes of the kernels for GPUs."""
WORTH_SHARING = 1 << 14
"""Number of elements above which a second thread pays off."""


def has_cpu_row_kernels(tensor: Tensor) -> bool:
    """Whether the compiled kernels support the dtype and device of this tensor."""
    return tensor.device.type == "cpu" and tensor.dtype in KINDS


def has_gpu_row_kernels(tensor: Tensor) -> bool:
    """Whether the kernels of `gpu.rows` support the dtype and device of this tensor."""
    return tensor.device.type == "cuda" and tensor.dtype in GPU_KINDS and has_triton()


def has_row_kernels(tensor: Tensor) -> bool:
    """The same for the operations of this module, which have kernels for both."""
    return has_gpu_row_kernels(tensor) or has_cpu_row_kernels(tensor)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension: [..., size] to [..., size].

    The quotient is rounded to the type of ``rows`` before the multiplication with the weight, as in the training of the
    models.
    """
    if rows.device.type == "cuda":
        from megatron_runtime.gpu import rows as gpu_rows  # Triton is not needed on other devices.

        return gpu_rows.normalize(rows, weight, None, eps, "rms")
    inputs = rows.contiguous()
    outputs, size = torch.empty_like(inputs), weight.shape[0]
    kernel = _rms_norm_kernel(rows.dtype is torch.bfloat16, rows.numel() >= WORTH_SHARING)
    kernel(address(inputs), address(outputs), address(weight), size, even_shares(inputs.numel() // size), eps)
    return outputs


def add_and_normalize(
    rows: Tensor, update: Tensor, multiplier: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``rows + multiplier * update`` and `rms_norm` of it on a CPU: each [T, size]."""
    sums, outputs = torch.empty_like(rows), torch.empty_like(rows)
    kernel = _add_and_normalize_kernel(rows.dtype is torch.bfloat16, rows.numel() >= WORTH_SHARING)
    places = address(rows), address(update), address(sums), address(outputs), address(weight)
    kernel(*places, weight.shape[0], even_shares(rows.shape[0]), multiplier, eps)
    return sums, outputs


def normalize_heads(heads: Tensor, counts: tuple[int, int], weights: tuple[Tensor, Tensor], eps: float) -> None:
    """`rms_norm` of each query and each key on a CPU, in place: [T, heads, width], contiguous.

    Args:
        heads: Queries, then keys, then others, which stay as they are.
        counts: The numbers of queries and keys.
        weights: Those of queries and of keys, each [width].
        eps: As for `rms_norm`.
    """
    rows, total, width = heads.shape
    kernel = _normalize_heads_kernel(heads.dtype is torch.bfloat16, heads.numel() >= WORTH_SHARING)
    places = address(heads), address(weights[0]), address(weights[1])
    kernel(*places, total, *counts, width, even_shares(rows), eps)


def gated_silu(gate_and_up: Tensor) -> Tensor:
    """``silu(gate) * up`` on a CPU: [T, 2 * size], gates first, to [T, size]."""
    rows, size = gate_and_up.shape[0], gate_and_up.shape[1] // 2
    outputs = gate_and_up.new_empty(rows, size)
    kernel = _gated_silu_kernel(gate_and_up.dtype is torch.bfloat16, outputs.numel() >= WORTH_SHARING)
    kernel(address(gate_and_up), address(outputs), size, even_shares(rows))
    return outputs


def gated_sigmoid(values: Tensor, gates: Tensor) -> Tensor:
    """``values * sigmoid(gates)``, of equal shapes."""
    if not has_cpu_row_kernels(values):
        return values * torch.sigmoid(gates)
    outputs = torch.empty_like(values, memory_format=torch.contiguous_format)
    flat = (as_array(part.reshape(-1)) for part in (values, gates, outputs))
    _gated_sigmoid_kernel(values.dtype is torch.bfloat16)(*flat)
    return outputs


def sigmoid(values: Tensor) -> Tensor:
    """Of each element. The bits do not depend on its place, as they do in PyTorch, whose vectors have other functions
    than the elements after the last vector.
    """
    return gated_sigmoid(torch.ones_like(values), values)


def prepare(dtype: torch.dtype, *, norms_of_heads: bool = True) -> None:
    """Compile the kernels for a dtype now, so that the first request does not wait for it.

    Models without ``norms_of_heads`` do not need the kernels of `normalize_heads`.
    """
    _gated_sigmoid_kernel(False)  # scores of routers are float32 for every dtype
    if dtype in KINDS:
        narrow = dtype is torch.bfloat16
        _gated_sigmoid_kernel(narrow)
        for parallel in (False, True):
            _rms_norm_kernel(narrow, parallel)
            _add_and_normalize_kernel(narrow, parallel)
            _gated_silu_kernel(narrow, parallel)
            if norms_of_heads:
                _normalize_heads_kernel(narrow, parallel)


@kernel_factory
def _gated_sigmoid_kernel(narrow: bool) -> Kernel:
    def gate(values: Any, gates: Any, outputs: Any) -> None:
        for place in range(len(values)):
            opened = rounded(logistic(widen(gates[place])), outputs)
            outputs[place] = narrowed(widen(values[place]) * opened, outputs)

    elements = scalar(narrow)[::1]
    return compile_kernel(gate, void(elements, elements, elements), parallel=False, fast=False)


@kernel_factory
def _rms_norm_kernel(narrow: bool, parallel: bool) -> Kernel:
    kind = element(narrow)

    def normalize(inputs: Any, outputs: Any, weight: Any, size: Any, bounds: Any, eps: Any) -> None:
        for share in prange(len(bounds) - 1):
            given, written = array_at(inputs, (bounds[-1], size), kind), array_at(outputs, (bounds[-1], size), kind)
            scales = array_at(weight, size, kind)
            for row in range(bounds[share], bounds[share + 1]):
                _normalize(given[row], written[row], scales, size, eps)

    return compile_kernel(normalize, void(int64, int64, int64, int64, int64[::1], float32), parallel=parallel)


@kernel_factory
def _add_and_normalize_kernel(narrow: bool, parallel: bool) -> Kernel:
    kind = element(narrow)

    def add(
        inputs: Any, updates: Any, sums: Any, outputs: Any, weight: Any, size: Any, bounds: Any, multiplier: Any,
        eps: Any,
    ) -> None:  # fmt: skip
        for share in prange(len(bounds) - 1):
            rows = bounds[-1]
            given, added = array_at(inputs, (rows, size), kind), array_at(updates, (rows, size), kind)
            totals, written = array_at(sums, (rows, size), kind), array_at(outputs, (rows, size), kind)
            scales = array_at(weight, size, kind)
            for row in range(bounds[share], bounds[share + 1]):
                for channel in range(size):
                    update = multiplier * widen(added[row, channel])
                    totals[row, channel] = narrowed(widen(given[row, channel]) + update, totals)
                _normalize(totals[row], written[row], scales, size, eps)

    signature = void(*[int64] * 6, int64[::1], float32, float32)
    return compile_kernel(add, signature, parallel=parallel)


@njit(inline="always")
def _normalize(inputs: Any, outputs: Any, weight: Any, size: Any, eps: Any) -> None:
    """One row of `rms_norm`."""
    total = np.float32(0)
    for channel in range(size):
        value = widen(inputs[channel])
        total += value * value
    # Rounded once, because it scales every row in every norm.
    inverse = np.float32(1 / np.sqrt(np.float64(total) / size + eps))
    for channel in range(size):
        scaled = rounded(widen(inputs[channel]) * inverse, outputs)
        outputs[channel] = narrowed(widen(weight[channel]) * scaled, outputs)


@kernel_factory
def _normalize_heads_kernel(narrow: bool, parallel: bool) -> Kernel:
    kind = element(narrow)

    def normalize(
        heads: Any, query_weight: Any, key_weight: Any, total: Any, queries: Any, keys: Any, width: Any, bounds: Any,
        eps: Any,
    ) -> None:  # fmt: skip
        for share in prange(len(bounds) - 1):
            given = array_at(heads, (bounds[-1], total, width), kind)
            of_queries, of_keys = array_at(query_weight, width, kind), array_at(key_weight, width, kind)
            for row in range(bounds[share], bounds[share + 1]):
                for head in range(queries):
                    _normalize(given[row, head], given[row, head], of_queries, width, eps)
                for head in range(queries, queries + keys):
                    _normalize(given[row, head], given[row, head], of_keys, width, eps)

    return compile_kernel(normalize, void(*[int64] * 7, int64[::1], float32), parallel=parallel)


@kernel_factory
def _gated_silu_kernel(narrow: bool, parallel: bool) -> Kernel:
    kind = element(narrow)

    def gate(inputs: Any, outputs: Any, size: Any, bounds: Any) -> None:
        for share in prange(len(bounds) - 1):
            given, gated = array_at(inputs, (bounds[-1], 2 * size), kind), array_at(outputs, (bounds[-1], size), kind)
            for row in range(bounds[share], bounds[share + 1]):
                for channel in range(size):
                    x = widen(given[row, channel])
                    opened = rounded(x / (np.float32(1) + exponential(-x)), gated)
                    gated[row, channel] = narrowed(opened * widen(given[row, size + channel]), gated)

    return compile_kernel(gate, void(int64, int64, int64, int64[::1]), parallel=parallel)
