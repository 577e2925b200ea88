"""The module of multi-head latent attention (DeepSeek-AI, DeepSeek-V2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.host_memory import empty_matrix
from megatron_runtime.model.kernels.gpu_attention import GpuAttention
from megatron_runtime.model.kernels.latent_products import absorb, expand
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
        self.query_rank = latent.q_lora_rank or 0
        self.down_width = self.query_rank + rank + rotated
        self.down = Linear(hidden, self.down_width, bias=config.qkv_bias, dtype=dtype)
        """The projections to the latent of the queries, if there is one, and to that of keys and values."""
        self.query_down_norm = RMSNorm(self.query_rank, latent.norm_eps, dtype) if self.query_rank else None
        self.query_up = Linear(self.query_rank or hidden, self.heads * self.head_dim, bias=False, dtype=dtype)
        self.kv_down_norm = RMSNorm(rank, latent.norm_eps, dtype)
        self.kv_up = empty_matrix(self.heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank, dtype)
        """Of each head, the rows that project a latent to its key, then those that project it to its value."""
        self.output = Linear(self.heads * latent.v_head_dim, hidden, bias=config.attention_output_bias, dtype=dtype)

    def forward(self, hidden: Tensor, positions: LayerPositions, plan: AttentionPlan, cache: LayerCache) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        query_latents, compressed = self.split(self.down(hidden))
        queries: Tensor = self.query_up(hidden if query_latents is None else query_latents)
        queries = queries.view(len(hidden), self.heads, self.head_dim)
        values = self.attend(queries, compressed, positions, plan, cache)
        projected: Tensor = self.output(values.flatten(1))
        return projected

    def split(self, projected: Tensor) -> tuple[Tensor | None, Tensor]:
        """The normalized latents of the queries, [T, query latent], if there are any, and those of keys and values with
        the channels to rotate, [T, latent + rotated], from the results of ``down``."""
        if self.query_down_norm is None:
            return None, projected
        return self.query_down_norm(projected[:, : self.query_rank]), projected[:, self.query_rank :]

    def attend(
        self, queries: Tensor, compressed: Tensor, positions: LayerPositions, plan: AttentionPlan, cache: LayerCache
    ) -> Tensor:
        """The values that the queries see: [T, heads, value width].

        Args:
            queries: [T, heads, head_dim].
            compressed: [T, latent + rotated], also as a part of wider rows.
            positions: Of the tokens.
            plan: Of the batch.
            cache: Of this layer.
        """
        up, scoring = self.kv_up.view(self.heads, -1, self.latent.kv_lora_rank), (self.window, self.soft_cap)
        if isinstance(plan, GpuAttention):
            from megatron_runtime.gpu.latent_attention import LatentMatrices  # Triton is not needed on other devices.

            norm = self.kv_down_norm.weight, self.kv_down_norm.eps
            matrices = LatentMatrices(
                up, norm, self.query_multiplier, self.latent.v_head_dim, is_interleaved=self.latent.rope_interleave
            )
            return plan.attend_latents(queries, compressed, matrices, positions.rotation, cache, *scoring)
        rows = self._rows(queries, compressed)
        absorb(queries, up, rows, self.query_multiplier)
        seen = plan.attend(rows, positions.rotation, cache, *scoring, value_width=self.latent.kv_lora_rank)
        return expand(seen, up, self.latent.v_head_dim)

    def _rows(self, queries: Tensor, compressed: Tensor) -> Tensor:
        """[T, heads + 1, rotated + latent]: the queries of all heads without the channels for latents, then the key
        that they share. In each row the channels to rotate come first.
        """
        rotated = self.latent.qk_rope_head_dim
        rows = compressed.new_empty(len(compressed), self.heads + 1, rotated + self.latent.kv_lora_rank)
        rows[:, :-1, :rotated] = self._halves(queries[..., -rotated:]) * self.query_multiplier
        rows[:, -1, :rotated] = self._halves(compressed[:, -rotated:])
        rows[:, -1, rotated:] = self.kv_down_norm(compressed[:, :-rotated])
        return rows

    def _halves(self, channels: Tensor) -> Tensor:
        """The channels to rotate in the order of `rotate`, which pairs the first half with the second."""
        if not self.latent.rope_interleave:
            return channels
        return channels.reshape(*channels.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
