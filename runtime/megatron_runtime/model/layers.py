"""Attention and feed-forward of a decoder. Weights are uninitialized until a checkpoint fills them.

Of a layer that ranks share, each has its heads and channels alone: the matrices that widen have fewer rows, those that
narrow fewer columns, and what comes out is a part of a sum over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.host_memory import empty_matrix
from megatron_runtime.model.kernels.row_kernels import gated_silu, has_row_kernels
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.norms import Norm, make_norm
from megatron_runtime.model.rotary import Rotation
from megatron_runtime.parallel.ranks import Ranks

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class Linear(nn.Module):
    """``y = x W^T + b`` without an initialization that the checkpoint would overwrite."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_matrix(out_features, in_features, dtype)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return functional.linear(inputs, self.weight, self.bias)


class SelfAttention(nn.Module):
    """Grouped-query attention; the projections of queries, keys and values are one matrix.

    The heads are those of ``config``; ``ranks`` have others.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        self.window = config.window(layer)
        self.soft_cap = config.attention_soft_cap
        self.clip = config.query_key_value_clip
        # The kernels divide by the square root of the head dimension; what a model wants instead goes into the queries.
        scale = config.attention_scale
        self.query_multiplier = None if scale is None else scale * math.sqrt(config.head_dim)
        attention_size = config.num_attention_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=config.qkv_bias, dtype=dtype)
        self.output = Linear(attention_size, config.hidden_size, bias=config.attention_output_bias, dtype=dtype)
        self.norms_whole_projection = config.query_key_norm == "projection"
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        if config.query_key_norm != "none":
            query_heads, key_heads = self.heads[:2] if self.norms_whole_projection else (1, 1)
            among = ranks if self.norms_whole_projection else None
            self.query_norm = make_norm(config, query_heads * config.head_dim, dtype, among)
            self.key_norm = make_norm(config, key_heads * config.head_dim, dtype, among)

    def forward(self, hidden: Tensor, rotary: Rotation | None, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """[T, hidden] to [T, hidden]; without ``rotary`` queries and keys aren't turned."""
        heads = self.qkv(hidden).view(len(hidden), -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys, values = heads.split(self.heads, dim=1)
            heads = torch.cat(
                (self._normalize(self.query_norm, queries), self._normalize(self.key_norm, keys), values), 1
            )
        if self.clip is not None:
            heads = heads.clamp(-self.clip, self.clip)
        if self.query_multiplier is not None:
            heads[:, : self.heads[0]] *= self.query_multiplier
        seen = plan.attend(heads, rotary, cache, self.window, self.soft_cap)
        projected: Tensor = self.output(seen.flatten(1))
        return projected

    def _normalize(self, norm: Norm, heads: Tensor) -> Tensor:
        normalized: Tensor = norm(heads.flatten(1) if self.norms_whole_projection else heads)
        return normalized.view(heads.shape)


class FeedForward(nn.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer), gate and up one matrix; or, not gated, ``down(act(up(x)))``.

    ``adds_bias`` says whether the bias of ``down`` is added here, if there is one, or by the rank that has it.
    """

    def __init__(
        self, config: ModelConfig, intermediate_size: int, dtype: torch.dtype, *, adds_bias: bool = True
    ) -> None:
        super().__init__()
        self.gated = config.gated_feed_forward
        self.is_silu_gated = self.gated and config.activation == "silu"
        self.activate = _ACTIVATIONS[config.activation]
        widened = 2 * intermediate_size if self.gated else intermediate_size
        self.gate_up = Linear(config.hidden_size, widened, bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(intermediate_size, config.hidden_size, bias=config.mlp_bias and adds_bias, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        widened = self.gate_up(hidden)
        if self.is_silu_gated and has_row_kernels(widened):
            widened = gated_silu(widened)
        elif self.gated:
            gate, up = widened.chunk(2, dim=-1)
            widened = self.activate(gate) * up
        else:
            widened = self.activate(widened)
        projected: Tensor = self.down(widened)
        return projected
