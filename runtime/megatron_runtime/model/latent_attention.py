"""The module of multi-head latent attention (DeepSeek-AI, DeepSeek-V2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.host_memory import empty_matrix
from megatron_runtime.model.kernels.latent_products import absorb, expand
from megatron_runtime.model.kernels.row_kernels import has_gpu_row_kernels
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.layers import Linear
from megatron_runtime.model.norms import RMSNorm
from megatron_runtime.model.positions import LayerPositions
from megatron_runtime.model.shard import Shard


class MLASelfAttention(nn.Module):
    """Attention to the latents themselves: queries absorb the projections from latents to keys.

    With ``k = U c`` for a latent c, ``q . k = (U^T q) . c``. So each query is multiplied by the key matrix of its head,
    and the weighted mean of latents by the head's value matrix. Prefill and decode compute the same, so that the result
    for a token does not depend on the pass that computes it.

    Has the heads of ``shard``; all tensor-parallel ranks have the projections to the latents. Weights are
    uninitialized.
    """

    rows_together: int | None = None
    """As ``rows`` of `products.linear`, of the products with the matrices of single heads."""

    def __init__(self, shard: Shard, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        config, latent = shard.local, shard.local.latent_attention
        assert latent is not None
        self.latent = latent
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.window = config.window(layer)
        self.soft_cap = config.attention_soft_cap
        hidden, rank, rotated = config.hidden_size, latent.kv_lora_rank, latent.qk_rope_head_dim
        # The kernels divide by the square root of the key width, which differs from the head dimension of the model.
        scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.query_multiplier = scale * math.sqrt(rotated + rank)
        self.query_down: Linear | None = None
        self.query_down_norm: RMSNorm | None = None
        columns = hidden
        if latent.q_lora_rank is not None:
            columns = latent.q_lora_rank
            self.query_down = Linear(hidden, columns, bias=config.qkv_bias, dtype=dtype)
            self.query_down_norm = RMSNorm(columns, latent.norm_eps, dtype)
        self.query_up = Linear(columns, self.heads * self.head_dim, bias=False, dtype=dtype)
        self.kv_down = Linear(hidden, rank + rotated, bias=config.qkv_bias, dtype=dtype)
        self.kv_down_norm = RMSNorm(rank, latent.norm_eps, dtype)
        self.kv_up = empty_matrix(self.heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank, dtype)
        """Of each head, the rows that project a latent to its key, then those that project it to its value."""
        self.output = Linear(self.heads * latent.v_head_dim, hidden, bias=config.attention_output_bias, dtype=dtype)

    def forward(self, hidden: Tensor, positions: LayerPositions, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        rows = self.empty_rows(hidden)
        queries, compressed, up = self._project_queries(hidden), self.kv_down(hidden), self._up()
        absorb(queries, up, rows, self.query_multiplier, self.rows_together)
        self.fill(rows, queries, compressed)
        seen = self.attend(rows, positions, plan, cache)
        values = expand(seen, up, self.latent.v_head_dim, self.rows_together)
        projected: Tensor = self.output(values.flatten(1))
        return projected

    def empty_rows(self, hidden: Tensor) -> Tensor:
        """[T, heads + 1, rotated + latent]: the queries of all heads, then the key that they share.

        In each row the channels to rotate come first.
        """
        width = self.latent.qk_rope_head_dim + self.latent.kv_lora_rank
        return hidden.new_empty(len(hidden), self.heads + 1, width)

    def fill(self, rows: Tensor, queries: Tensor, compressed: Tensor) -> None:
        """Write all but the latent channels of the queries into rows.

        Args:
            rows: As of `empty_rows`.
            queries: [T, heads, head_dim].
            compressed: [T, latent + rotated].
        """
        norm, rotated = self.kv_down_norm, self.latent.qk_rope_head_dim
        if has_gpu_row_kernels(rows):
            from megatron_runtime.gpu import latent_attention  # Triton is not needed on other devices.

            arrays, is_interleaved = (rows, queries, compressed, norm.weight), self.latent.rope_interleave
            latent_attention.fill_rows(*arrays, norm.eps, self.query_multiplier, is_interleaved=is_interleaved)
            return
        rows[:, :-1, :rotated] = self._halves(queries[..., -rotated:]) * self.query_multiplier
        rows[:, -1, :rotated] = self._halves(compressed[:, -rotated:])
        rows[:, -1, rotated:] = norm(compressed[:, :-rotated])

    def attend(self, rows: Tensor, positions: LayerPositions, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """The means of latents that the queries in filled rows see: [T, heads, latent]."""
        rank = self.latent.kv_lora_rank
        return plan.attend(rows, positions.rotation, cache, self.window, self.soft_cap, value_width=rank)

    def _up(self) -> Tensor:
        return self.kv_up.view(self.heads, -1, self.latent.kv_lora_rank)

    def _project_queries(self, hidden: Tensor) -> Tensor:
        """[T, heads, head_dim]."""
        if self.query_down is not None and self.query_down_norm is not None:
            hidden = self.query_down_norm(self.query_down(hidden))
        queries: Tensor = self.query_up(hidden)
        return queries.view(len(hidden), self.heads, self.head_dim)

    def _halves(self, channels: Tensor) -> Tensor:
        """The channels to rotate in the order of `rotate`, which pairs the first half with the second."""
        if not self.latent.rope_interleave:
            return channels
        return channels.reshape(*channels.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
