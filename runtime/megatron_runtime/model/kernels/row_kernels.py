"""Operations on single rows, with one pass over the memory instead of several PyTorch operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import float32, int64, njit, prange, void
from torch import Tensor

from megatron_runtime.model.kernels.compiled import (
    KINDS,
    as_array,
    compile_kernel,
    even_shares,
    exponential,
    logistic,
    narrowed,
    rounded,
    scalar,
    widen,
)
from megatron_runtime.model.kernels.kernel_compiler import Kernel, kernel_factory
from megatron_runtime.model.kernels.triton_support import has_triton

GPU_KINDS = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes of the kernels for GPUs."""
WORTH_SHARING = 1 << 17
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
    outputs = torch.empty_like(inputs)
    arrays = (as_array(part.view(-1, len(weight))) for part in (inputs, outputs))
    kernel = _rms_norm_kernel(rows.dtype is torch.bfloat16, rows.numel() >= WORTH_SHARING)
    kernel(*arrays, as_array(weight), even_shares(inputs.numel() // len(weight)), eps)
    return outputs


def add_and_normalize(
    rows: Tensor, update: Tensor, multiplier: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``rows + multiplier * update`` and `rms_norm` of it on a CPU: each [T, size]."""
    sums, outputs = torch.empty_like(rows), torch.empty_like(rows)
    arrays = (as_array(part) for part in (rows, update, sums, outputs, weight))
    kernel = _add_and_normalize_kernel(rows.dtype is torch.bfloat16, rows.numel() >= WORTH_SHARING)
    kernel(*arrays, even_shares(len(rows)), multiplier, eps)
    return sums, outputs


def gated_silu(gate_and_up: Tensor) -> Tensor:
    """``silu(gate) * up`` on a CPU: [T, 2 * size], gates first, to [T, size]."""
    outputs = gate_and_up.new_empty(len(gate_and_up), gate_and_up.shape[1] // 2)
    kernel = _gated_silu_kernel(gate_and_up.dtype is torch.bfloat16, outputs.numel() >= WORTH_SHARING)
    kernel(as_array(gate_and_up), as_array(outputs), even_shares(len(outputs)))
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


def prepare(dtype: torch.dtype) -> None:
    """Compile the kernels for a dtype now, so that the first request does not wait for it."""
    _gated_sigmoid_kernel(False)  # scores of routers are float32 for every dtype
    if dtype in KINDS:
        _gated_sigmoid_kernel(dtype is torch.bfloat16)
        for parallel in (False, True):
            _rms_norm_kernel(dtype is torch.bfloat16, parallel)
            _add_and_normalize_kernel(dtype is torch.bfloat16, parallel)
            _gated_silu_kernel(dtype is torch.bfloat16, parallel)


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
    def normalize(inputs: Any, outputs: Any, weight: Any, bounds: Any, eps: Any) -> None:
        size = inputs.shape[1]
        for share in prange(len(bounds) - 1):
            for row in range(bounds[share], bounds[share + 1]):
                _normalize(inputs[row], outputs[row], weight, size, eps)

    rows = scalar(narrow)[:, ::1]
    return compile_kernel(normalize, void(rows, rows, scalar(narrow)[::1], int64[::1], float32), parallel=parallel)


@kernel_factory
def _add_and_normalize_kernel(narrow: bool, parallel: bool) -> Kernel:
    def add(
        inputs: Any, updates: Any, sums: Any, outputs: Any, weight: Any, bounds: Any, multiplier: Any, eps: Any
    ) -> None:
        size = inputs.shape[1]
        for share in prange(len(bounds) - 1):
            for row in range(bounds[share], bounds[share + 1]):
                for channel in range(size):
                    update = multiplier * widen(updates[row, channel])
                    sums[row, channel] = narrowed(widen(inputs[row, channel]) + update, sums)
                _normalize(sums[row], outputs[row], weight, size, eps)

    rows, bounds = scalar(narrow)[:, ::1], int64[::1]
    signature = void(rows, rows, rows, rows, scalar(narrow)[::1], bounds, float32, float32)
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
def _gated_silu_kernel(narrow: bool, parallel: bool) -> Kernel:
    def gate(inputs: Any, outputs: Any, bounds: Any) -> None:
        size = outputs.shape[1]
        for share in prange(len(bounds) - 1):
            for row in range(bounds[share], bounds[share + 1]):
                for channel in range(size):
                    x = widen(inputs[row, channel])
                    opened = rounded(x / (np.float32(1) + exponential(-x)), outputs)
                    outputs[row, channel] = narrowed(opened * widen(inputs[row, size + channel]), outputs)

    rows = scalar(narrow)[:, ::1]
    return compile_kernel(gate, void(rows, rows, int64[::1]), parallel=parallel)
