"""The kinds of attention: how tensor-parallel ranks divide the heads, and the cache layout. Without torch.

The computation of a kind is in its module, which `decoder_layer.make_attention` builds; the names of its tensors are in
`formats.expected_tensors` and `placements`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_runtime.model.cache_layout import CacheLayout
from megatron_runtime.model.config import ModelConfig

ATTENTION_BACKENDS = ("auto", "flashinfer")
"""What attends: the implementation for the device, or FlashInfer."""


class AttentionKind(ABC):
    """The attention of a model, or of one rank's part of it, whose sizes ``config`` gives."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @abstractmethod
    def kv_heads(self, ranks: int, rank: int) -> range:
        """The key and value heads that the query heads of one of ``ranks`` tensor-parallel ranks attend to."""

    @abstractmethod
    def can_divide(self, ranks: int) -> bool:
        """Whether ``ranks`` tensor-parallel ranks can have equal numbers of heads."""

    @property
    @abstractmethod
    def cache_layout(self) -> CacheLayout:
        """What is cached of each token in all layers of ``config``."""


class GroupedQueryAttention(AttentionKind):
    """Groups of query heads share a key and value head (Ainslie et al., GQA): one group in MQA, one per head in MHA.

    The cache holds the rotated keys and the values of the heads that a rank has.
    """

    def kv_heads(self, ranks: int, rank: int) -> range:
        """Equal parts; with fewer heads than ranks, each head is on several ranks."""
        heads = self.config.num_kv_heads
        first = rank * heads // ranks
        return range(first, first + max(heads // ranks, 1))

    def can_divide(self, ranks: int) -> bool:
        """Whether a rank has whole groups, or a part of a single group."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_kv_heads
        return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    @property
    def cache_layout(self) -> CacheLayout:
        """One key and one value per key and value head, in the layers with attention; recurrent ones have states."""
        config, recurrent = self.config, self.config.recurrent
        return CacheLayout(
            config.attention_layers,
            *(config.num_kv_heads, config.head_dim, config.head_dim),
            state_bytes=0 if recurrent is None else recurrent.state_bytes,
        )


class MultiHeadLatentAttention(AttentionKind):
    """The keys and values of all heads come from one latent per token (DeepSeek-AI, DeepSeek-V2).

    The cache holds the latent beside the rotated part of the key, which all heads have in common. Ranks divide the
    heads; as every head needs the whole latent, each rank caches all of it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.latent_attention is not None
        self.latent = config.latent_attention

    def kv_heads(self, ranks: int, rank: int) -> range:
        """Each query head has its own key and value, projected from the latent."""
        heads = self.config.num_attention_heads // ranks
        return range(rank * heads, (rank + 1) * heads)

    def can_divide(self, ranks: int) -> bool:
        """Whether the heads divide evenly."""
        return self.config.num_attention_heads % ranks == 0

    @property
    def cache_layout(self) -> CacheLayout:
        """One key for all heads: the rotated channels, then the latent, which is also the value."""
        rank = self.latent.kv_lora_rank
        return CacheLayout(
            self.config.num_layers,
            heads=1,
            key_width=self.latent.qk_rope_head_dim + rank,
            value_width=rank,
            values_in_keys=True,
        )


def attention_kind(config: ModelConfig) -> AttentionKind:
    """The kind of attention that ``config`` describes."""
    return GroupedQueryAttention(config) if config.latent_attention is None else MultiHeadLatentAttention(config)
