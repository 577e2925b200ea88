"""One layer of a decoder: attention or a recurrence, and feed-forward, or one of them alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.attention_kind import MultiHeadLatentAttention
from megatron_runtime.model.experts import Experts
from megatron_runtime.model.gated_delta_net import GatedDeltaNet
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.latent_attention import MLASelfAttention
from megatron_runtime.model.layers import FeedForward
from megatron_runtime.model.mamba import Mamba2
from megatron_runtime.model.norms import NO_NORM, Norm, add_and_normalize, make_norm
from megatron_runtime.model.positions import LayerPositions
from megatron_runtime.model.recurrence import RecurrentPlan
from megatron_runtime.model.recurrent_config import GatedDeltaConfig, Mamba2Config
from megatron_runtime.model.routing_tape import RoutingTape
from megatron_runtime.model.self_attention import SelfAttention
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.ranks import Ranks

Attention = SelfAttention | MLASelfAttention | GatedDeltaNet | Mamba2
"""The modules of attention and of recurrences."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward on a residual path, with norms of their inputs, their outputs, or both. A recurrent
    layer has a recurrence in the place of attention.

    Each rank that shares the layer has the whole residual path, and computes parts of the values that are added to it.
    A layer gets the path with the norm of it, and returns both for what follows: on a GPU the kernel of a sum computes
    the norm of the sum too.
    """

    def __init__(self, shard: Shard, layer: int, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        config = shard.local

        def norm(*placements: str) -> Norm | nn.Identity:
            wanted = config.norm_placement in placements
            return make_norm(config, config.hidden_size, dtype) if wanted else nn.Identity()

        self.hidden_size = config.hidden_size
        self.residual_multiplier = config.residual_multiplier
        self.attention_norm = norm("before", "around")
        self.attention = make_attention(shard, layer, dtype, ranks)
        self.attention_output_norm = norm("after", "around")
        self.is_parallel = config.parallel_feed_forward
        self.feed_forward_norm = nn.Identity() if self.is_parallel else norm("before", "around")
        self.feed_forward = make_feed_forward(shard, layer, dtype, ranks)
        self.sum_parts = ranks.sum
        self.sum_feed_forward = ranks.sum_experts if isinstance(self.feed_forward, Experts) else ranks.sum
        self.feed_forward_output_norm = norm("after", "around")
        if not self.is_parallel:  # Otherwise both parts are needed at the same time.
            if isinstance(self.attention, SelfAttention | MLASelfAttention):
                self.attention.output.memory_for_part = ranks.memory_for_part
            if isinstance(self.feed_forward, FeedForward):
                self.feed_forward.down.memory_for_part = ranks.memory_for_part

    @property
    def input_norm(self) -> Norm | nn.Identity:
        """The norm of ``normed``, which the layer before computes."""
        return self.attention_norm

    def forward(
        self,
        hidden: Tensor,
        normed: Tensor,
        positions: LayerPositions,
        plan: AttentionPlan | RecurrentPlan,
        cache: LayerCache,
        next_norm: Norm | nn.Identity,
        tape: RoutingTape | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual path and `input_norm` of it to the path after this layer and ``next_norm`` of that: each is
        [T, hidden].
        """
        if self.is_parallel:
            attended = self.attention(normed, positions, plan, cache)
            update = self.sum_parts(attended + self.feed_forward(normed))
            return self._add(hidden, update, self.attention_output_norm, next_norm)
        attended = self.sum_parts(self.attention(normed, positions, plan, cache))
        hidden, normed = self._add(hidden, attended, self.attention_output_norm, self.feed_forward_norm)
        del attended  # So that the feed-forward network can use its memory.
        is_recorded = tape is not None and isinstance(self.feed_forward, Experts)
        fed = self.sum_feed_forward(self.feed_forward(normed, tape) if is_recorded else self.feed_forward(normed))
        return self._add(hidden, fed, self.feed_forward_output_norm, next_norm)

    def use_norms(self, rows: Tensor, next_norm: Norm | nn.Identity) -> None:
        """Launch the kernels of sums and norms on rows [T, hidden], which are on a GPU."""
        self._add(rows, rows, self.attention_output_norm, self.feed_forward_norm)
        self._add(rows, rows, self.feed_forward_output_norm, next_norm)

    def _add(
        self, hidden: Tensor, update: Tensor, update_norm: Norm | nn.Identity, next_norm: Norm | nn.Identity
    ) -> tuple[Tensor, Tensor]:
        return add_and_normalize(hidden, update, self.residual_multiplier, update_norm, next_norm)


class SingleMixerLayer(nn.Module):
    """Attention, a recurrence or a feed-forward network alone on a residual path, with a norm of its input
    (Nemotron-H).
    """

    def __init__(self, shard: Shard, layer: int, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        config = shard.local
        self.residual_multiplier = config.residual_multiplier
        self.norm = make_norm(config, config.hidden_size, dtype)
        make = make_feed_forward if config.kind(layer) == "feed_forward" else make_attention
        self.mixer: Attention | FeedForward | Experts = make(shard, layer, dtype, ranks)
        self.sum_parts = ranks.sum_experts if isinstance(self.mixer, Experts) else ranks.sum

    @property
    def input_norm(self) -> Norm:
        """As that of DecoderLayer."""
        return self.norm

    def forward(
        self,
        hidden: Tensor,
        normed: Tensor,
        positions: LayerPositions,
        plan: AttentionPlan | RecurrentPlan,
        cache: LayerCache,
        next_norm: Norm | nn.Identity,
        tape: RoutingTape | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        if isinstance(self.mixer, Experts):
            update = self.mixer(normed, tape)
        elif isinstance(self.mixer, FeedForward):
            update = self.mixer(normed)
        else:
            update = self.mixer(normed, positions, plan, cache)
        return add_and_normalize(hidden, self.sum_parts(update), self.residual_multiplier, NO_NORM, next_norm)


class NumberedLayer(NamedTuple):
    """A layer with what the decoder knows of its place."""

    number: int
    """In the whole model."""
    layer: DecoderLayer | SingleMixerLayer
    next_norm: Norm | nn.Identity
    """That of the next layer's input, or the last one, of the head."""


def make_layer(shard: Shard, layer: int, dtype: torch.dtype, ranks: Ranks) -> DecoderLayer | SingleMixerLayer:
    """The layer with this number. Its weights are uninitialized."""
    kind = DecoderLayer if shard.config.feed_forward_layers is None else SingleMixerLayer
    return kind(shard, layer, dtype, ranks)


def make_feed_forward(shard: Shard, layer: int, dtype: torch.dtype, ranks: Ranks) -> FeedForward | Experts:
    """The feed-forward network or the experts of this layer. Their weights are uninitialized."""
    if (experts := shard.config.experts_of(layer)) is not None:
        return Experts(shard, experts, dtype, ranks)
    return FeedForward(shard.local, len(shard.channels), dtype, adds_bias=shard.position.tensor_rank == 0)


def make_attention(shard: Shard, layer: int, dtype: torch.dtype, ranks: Ranks) -> Attention:
    """The module for the kind of attention of the model, or for the recurrence of this layer. Its weights are
    uninitialized.
    """
    sizes = shard.local.recurrence_of(layer)
    if isinstance(sizes, Mamba2Config):
        return Mamba2(shard.local, sizes, dtype, adds_bias=shard.position.tensor_rank == 0)
    if isinstance(sizes, GatedDeltaConfig):
        return GatedDeltaNet(shard.local, sizes, dtype)
    if isinstance(shard.attention, MultiHeadLatentAttention):
        return MLASelfAttention(shard, layer, dtype)
    return SelfAttention(shard, layer, dtype, ranks)
