"""Norms and activations of single rows."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_runtime.gpu.launch import launch, power_of_two
from megatron_runtime.gpu.row_kernels import gate_rows, normalize_rows

GATE_BLOCK = 1024
CHANNELS_PER_WARP = 512
MOST_WARPS = 16


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension: [..., size] to [..., size]; one launch for
    contiguous rows."""
    rows = rows.contiguous()
    output = torch.empty_like(rows)
    size = len(weight)
    launch(
        normalize_rows,
        (rows.numel() // size,),
        (output, rows, weight, eps),
        SIZE=size,
        SIZE_PAD=power_of_two(size),
        num_warps=warps_for(size),
    )
    return output


def gated_silu(gates_and_values: Tensor) -> Tensor:
    """``silu(gate) * value``: [T, 2 * size], gates first, to [T, size]; one launch."""
    count, size = len(gates_and_values), gates_and_values.shape[1] // 2
    output = gates_and_values.new_empty(count, size)
    launch(gate_rows, (count, -(-size // GATE_BLOCK)), (output, gates_and_values), SIZE=size, BLOCK=GATE_BLOCK)
    return output


def warps_for(size: int) -> int:
    """Warps for a row: a power of two."""
    return min(max(power_of_two(size) // CHANNELS_PER_WARP, 1), MOST_WARPS)
