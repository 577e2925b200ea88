"""Linear and feed-forward layers of a decoder. Weights are uninitialized until a checkpoint fills them.

Ranks that share a layer divide its heads and channels: widening matrices have fewer rows, narrowing ones fewer columns,
and the output is a part of a sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.host_memory import empty_matrix
from megatron_runtime.model.kernels.row_kernels import gated_silu, has_cpu_row_kernels, has_gpu_row_kernels
from megatron_runtime.model.products import linear, write_linear

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu_squared": lambda widened: functional.relu(widened).square(),
}


class Linear(nn.Module):
    """``y = x W^T + b``, without an initialization that the checkpoint would overwrite."""

    rows_together: int | None = None
    """As ``rows`` of `products.linear`."""
    memory_for_part: Callable[[Sequence[int], torch.dtype], Tensor | None] | None = None
    """Of results that are parts of a sum over ranks, as in `ranks.Ranks`. The sum has to follow at once."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_matrix(out_features, in_features, dtype)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.memory_for_part is not None and self.rows_together is None:
            output = self.memory_for_part((*inputs.shape[:-1], len(self.weight)), inputs.dtype)
            if output is not None:
                return write_linear(output, inputs, self.weight, self.bias)
        return linear(inputs, self.weight, self.bias, self.rows_together)


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer), with gate and up in one matrix; or without a gate ``down(act(up(x)))``.

    ``adds_bias``: whether this rank adds the bias of ``down``, if there is one.
    """

    def __init__(
        self, config: ModelConfig, intermediate_size: int, dtype: torch.dtype, *, adds_bias: bool = True
    ) -> None:
        super().__init__()
        self.gated = config.gated_feed_forward
        self.clamped_gate = config.clamped_gate
        self.is_silu_gated = self.gated and config.activation == "silu"
        self.activation = config.activation
        self.activate = _ACTIVATIONS[config.activation]
        widened = 2 * intermediate_size if self.gated else intermediate_size
        self.gate_up = Linear(config.hidden_size, widened, bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(intermediate_size, config.hidden_size, bias=config.mlp_bias and adds_bias, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        projected: Tensor = self.down(self.combine(self.gate_up(hidden)))
        return projected

    def combine(self, widened: Tensor) -> Tensor:
        """The input of ``down`` from the output of ``gate_up``."""
        clamped = None if self.clamped_gate is None else (self.clamped_gate.alpha, self.clamped_gate.limit)
        if (self.gated or clamped is not None) and has_gpu_row_kernels(widened):
            from megatron_runtime.gpu import rows  # Triton is not needed on other devices.

            return rows.gated(widened, self.activation, clamped)
        if clamped is not None:
            alpha, limit = clamped
            gate, up = widened.chunk(2, dim=-1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + 1)
        if self.is_silu_gated and has_cpu_row_kernels(widened):
            return gated_silu(widened)
        if self.gated:
            gate, up = widened.chunk(2, dim=-1)
            return self.activate(gate) * up
        return self.activate(widened)


def float32_weights(*shape: int) -> nn.Parameter:
    """Uninitialized weights that are float32 for every dtype of the model."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
