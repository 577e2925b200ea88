"""The module of grouped-query attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.kernels.row_kernels import gated_sigmoid
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.layers import Linear
from megatron_runtime.model.norms import LayerNormWithoutBias, Norm, make_norm, normalize_heads, normalize_projections
from megatron_runtime.model.positions import LayerPositions
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.ranks import Ranks


class SelfAttention(nn.Module):
    """Grouped-query attention; the projections of queries, keys and values are one matrix.

    Has the heads of ``shard``; the other tensor-parallel ranks have the other heads. Weights are uninitialized.
    """

    def __init__(self, shard: Shard, layer: int, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        config = shard.local
        self.head_dim = config.head_dim
        self.heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        self.window = config.window(layer)
        self.is_chunked = config.chunked_windows
        self.soft_cap = config.attention_soft_cap
        self.sinks: nn.Parameter | None = None
        """Scores that take part in the softmax, one for each query head."""
        if config.attention_sinks:
            sinks = torch.empty(config.num_attention_heads, dtype=torch.float32)
            self.sinks = nn.Parameter(sinks, requires_grad=False)
        self.clip = config.query_key_value_clip
        # The kernels divide by the square root of the head dimension; another scale is applied to the queries.
        scale = config.attention_scale
        self.query_multiplier = None if scale is None else scale * math.sqrt(config.head_dim)
        attention_size = config.num_attention_heads * config.head_dim
        self.has_gate = config.attention_output_gate
        rows = sum(self.heads) * config.head_dim + (attention_size if self.has_gate else 0)
        self.qkv = Linear(config.hidden_size, rows, bias=config.qkv_bias, dtype=dtype)
        """With gates, each query head is followed by its gate."""
        self.output = Linear(attention_size, config.hidden_size, bias=config.attention_output_bias, dtype=dtype)
        self.head_order: Tensor | None = None
        """int64 [heads]: where the projection has each query, key and value head; None: in this order."""
        self.norms_whole_projection = config.query_key_norm == "projection"
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        self.rotary_dim = config.rotary_dim or config.head_dim
        self.is_interleaved = config.rope_interleave and layer not in config.unrotated_layers
        self.unweighted_eps: float | None = None
        """Epsilon of a norm without weights."""
        if config.query_key_norm == "unweighted":
            self.unweighted_eps = config.rms_norm_eps if layer not in config.unrotated_layers else None
        elif config.query_key_norm == "each_head":
            self.query_norm, self.key_norm = (
                LayerNormWithoutBias((count, config.head_dim), config.rms_norm_eps, dtype) for count in self.heads[:2]
            )
        elif config.query_key_norm != "none":
            query_heads, key_heads = self.heads[:2] if self.norms_whole_projection else (1, 1)
            among = ranks if self.norms_whole_projection else None
            self.query_norm = make_norm(config, query_heads * config.head_dim, dtype, among)
            self.key_norm = make_norm(config, key_heads * config.head_dim, dtype, among)

    def forward(self, hidden: Tensor, positions: LayerPositions, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        heads = self.qkv(hidden).view(len(hidden), -1, self.head_dim)
        if self.head_order is not None:
            heads = heads.index_select(1, self.head_order)
        gates: Tensor | None = None
        if self.has_gate:
            pairs, others = heads.split((2 * self.heads[0], 2 * self.heads[1]), dim=1)
            queries, gates = pairs.unflatten(1, (-1, 2)).unbind(2)
            heads = torch.cat((queries, others), 1)
        heads = self.normalized(heads)
        turned = heads[:, : -self.heads[2]]
        if self.unweighted_eps is not None:
            # The rotation does not change the norm, so the order of both does not matter.
            turned.copy_(functional.rms_norm(turned.float(), (self.head_dim,), eps=self.unweighted_eps))
        if self.is_interleaved:
            # The kernels rotate the channels of the first half with those of the second one.
            pairs = torch.unflatten(turned[..., : self.rotary_dim], -1, (-1, 2))
            turned[..., : self.rotary_dim] = pairs.transpose(-1, -2).flatten(-2)
        if self.clip is not None:
            heads = heads.clamp(-self.clip, self.clip)
        if self.query_multiplier is not None:
            heads[:, : self.heads[0]] *= self.query_multiplier
        if positions.query_scale is not None:
            heads[:, : self.heads[0]] *= positions.query_scale
        seen = plan.attend(
            heads, positions.rotation, cache, self.window, self.soft_cap, sinks=self.sinks, is_chunked=self.is_chunked
        )
        if gates is not None:
            seen = gated_sigmoid(seen, gates)
        projected: Tensor = self.output(seen.flatten(1))
        return projected

    def normalized(self, heads: Tensor) -> Tensor:
        """Heads [T, heads, head_dim] with the norms of queries and keys, if there are any; may change ``heads``."""
        if self.query_norm is None or self.key_norm is None:
            return heads
        normalize = normalize_projections if self.norms_whole_projection else normalize_heads
        return normalize(heads, self.heads, self.query_norm, self.key_norm)
