"""The layers of a decoder. Weights are uninitialized until a checkpoint fills them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.attention import AttentionPlan, LayerCache
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.rotary import rotate


class Linear(nn.Module):
    """``y = x W^T + b`` without an initialization that the checkpoint would overwrite."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter((out_features, in_features), dtype)
        self.bias = _parameter((out_features,), dtype) if bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return functional.linear(inputs, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich) in float32, whatever the weights' type."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter((size,), dtype)
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        wide = inputs.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(inputs.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention; the projections of queries, keys and values are one matrix."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        self.window = config.window(layer)
        attention_size = config.num_attention_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=config.qkv_bias, dtype=dtype)
        self.output = Linear(attention_size, config.hidden_size, bias=config.attention_output_bias, dtype=dtype)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.query_key_norm:
            self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        heads = self.qkv(hidden).view(len(hidden), -1, self.head_dim)
        queries, keys, values = heads.split(self.heads, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        seen = plan.attend(rotate(queries, *rotary), rotate(keys, *rotary), values, cache, self.window)
        projected: Tensor = self.output(seen.flatten(1))
        return projected


class FeedForward(nn.Module):
    """SwiGLU (Shazeer): ``down(silu(gate(x)) * up(x))``; gate and up are one matrix."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        projected: Tensor = self.down(functional.silu(gate) * up)
        return projected


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = SelfAttention(config, layer, dtype)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.feed_forward = FeedForward(config, dtype)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        attended: Tensor = hidden + self.attention(self.attention_norm(hidden), rotary, plan, cache)
        fed: Tensor = self.feed_forward(self.feed_forward_norm(attended))
        return attended + fed


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
