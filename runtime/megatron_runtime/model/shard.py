"""The part of a model on a rank: pure arithmetic over the model's sizes and the rank's place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.attention_kind import AttentionKind, attention_kind
from megatron_runtime.model.config import ExpertsConfig, LayerKind, ModelConfig
from megatron_runtime.model.recurrent_config import RecurrentConfig
from megatron_runtime.parallel.layout import RankPosition, share


@dataclass(frozen=True)
class Shard:
    """One rank's part of the model that ``config`` describes; in a replica group of one rank, all of it.

    The ranks of a layer divide its query heads with their key and value heads, the channels of its feed-forward
    networks, and the rows of embedding and head. A key and value head that belongs to the queries of several ranks is
    on all of them; those of recurrent layers are on one, with all of their value heads. The output of a rank's part is
    a part of a sum, to which the first rank adds the bias.

    Raises:
        ConfigurationError: The model can't be divided like this; names the size and the possible ones.
    """

    config: ModelConfig
    position: RankPosition = field(default_factory=RankPosition)

    def __post_init__(self) -> None:
        sizes, config = self.position.sizes, self.config
        if not self._can_share_layer(sizes.tensor):
            fitting = [size for size in range(1, config.num_attention_heads + 1) if self._can_share_layer(size)]
            recurrent, keys = config.recurrent, ""
            if recurrent is not None:
                keys = f" {recurrent.key_heads} key heads (groups) in recurrent layers,"
            raise ConfigurationError(
                f"tensor parallel size is {sizes.tensor}, but the model has {config.num_attention_heads} attention "
                f"heads on {config.num_kv_heads} key/value heads,{keys} an intermediate size of "
                f"{config.intermediate_size} and {config.vocab_size} tokens; use one of "
                f"{', '.join(map(str, fitting))}",
                field="tensor",
            )
        self._check_experts(sizes.expert)
        self._check_stages()

    @cached_property
    def attention(self) -> AttentionKind:
        """The attention of the whole model."""
        return attention_kind(self.config)

    @cached_property
    def layers(self) -> range:
        """The layers on this rank."""
        return self._stage_layers(self.position.stage)

    @cached_property
    def local(self) -> ModelConfig:
        """The configuration of one layer on this rank: with its heads, and their bias if it is added here."""
        config = self.config
        return replace(
            config,
            num_attention_heads=len(self.query_heads),
            num_kv_heads=len(self.kv_heads),
            recurrent=None if config.recurrent is None else config.recurrent.divide(self.position.sizes.tensor),
            attention_output_bias=config.attention_output_bias and self.position.tensor_rank == 0,
        )

    @cached_property
    def cache_config(self) -> ModelConfig:
        """The configuration of the cache of this rank."""
        return self._cache_of([self.config.kind(layer) for layer in self.layers])

    @cached_property
    def largest_cache_config(self) -> ModelConfig:
        """That of a stage with as many layers of each kind as any stage has, which determines the number of blocks, and
        of slots for recurrent states, on every rank.
        """
        stages = [self._stage_layers(stage) for stage in range(self.position.sizes.pipeline)]
        kinds = [[self.config.kind(layer) for layer in layers] for layers in stages]
        return self._cache_of([kind for kind in get_args(LayerKind) for _ in range(max(k.count(kind) for k in kinds))])

    @cached_property
    def query_heads(self) -> range:
        """The query heads on this rank."""
        return self._of_layer(self.config.num_attention_heads)

    @cached_property
    def kv_heads(self) -> range:
        """Their key and value heads."""
        return self.attention.kv_heads(self.position.sizes.tensor, self.position.tensor_rank)

    def recurrent_key_heads(self, recurrent: RecurrentConfig) -> range:
        """The key heads of a recurrent layer on this rank."""
        return self._of_layer(recurrent.key_heads)

    def recurrent_value_heads(self, recurrent: RecurrentConfig) -> range:
        """Their value heads."""
        return self._of_layer(recurrent.value_heads)

    @cached_property
    def channels(self) -> range:
        """The channels between the two matrices of a feed-forward network on this rank."""
        return self._of_layer(self.config.intermediate_size)

    def experts(self, experts: ExpertsConfig) -> range:
        """The experts on this rank."""
        return share(experts.count, self.position.sizes.expert, self.position.expert_group)

    def expert_channels(self, experts: ExpertsConfig) -> range:
        """The channels of each expert on this rank."""
        return share(experts.intermediate_size, self.position.expert_slices, self.position.expert_slice)

    def shared_expert_channels(self, experts: ExpertsConfig) -> range:
        """The channels of the shared expert on this rank."""
        position = self.position
        return share(experts.shared_intermediate_size, position.sizes.ranks_per_stage, position.stage_rank)

    @cached_property
    def vocabulary(self) -> range:
        """The tokens whose rows of embedding and head are on this rank."""
        return self._of_layer(self.config.vocab_size)

    @cached_property
    def vocabulary_widths(self) -> list[int]:
        """Number of tokens on each rank of a layer."""
        ranks = self.position.sizes.tensor
        return [len(share(self.config.vocab_size, ranks, rank)) for rank in range(ranks)]

    def _of_layer(self, total: int) -> range:
        return share(total, self.position.sizes.tensor, self.position.tensor_rank)

    def _stage_layers(self, stage: int) -> range:
        sizes = self.position.sizes
        if not sizes.stage_layers:
            return share(self.config.num_layers, sizes.pipeline, stage)
        start = sum(sizes.stage_layers[:stage])
        return range(start, start + sizes.stage_layers[stage])

    def _can_share_layer(self, tensor: int) -> bool:
        """Whether this number of ranks can share a layer: heads evenly, all else as evenly as possible."""
        rows, recurrent = min(self.config.intermediate_size, self.config.vocab_size), self.config.recurrent
        can_divide = self.attention.can_divide(tensor) and (recurrent is None or recurrent.can_divide(tensor))
        return can_divide and rows >= tensor

    def _cache_of(self, kinds: Sequence[LayerKind]) -> ModelConfig:
        """The configuration of a cache for layers of these kinds on a rank."""

        def numbers(wanted: LayerKind) -> frozenset[int]:
            return frozenset(layer for layer, kind in enumerate(kinds) if kind == wanted)

        local = self.local
        return replace(
            local,
            num_layers=len(kinds),
            recurrent=None if local.recurrent is None else replace(local.recurrent, layers=numbers("recurrence")),
            feed_forward_layers=None if local.feed_forward_layers is None else numbers("feed_forward"),
        )

    def _check_experts(self, expert: int) -> None:
        experts = self.config.experts
        if experts is None and expert > 1:
            raise ConfigurationError(
                f"expert parallel size is {expert}, but the model has no experts; use 1", field="expert"
            )
        if experts is None:
            return
        tensor, ranks = self.position.sizes.tensor, self.position.sizes.ranks_per_stage
        if not _can_divide_experts(experts, tensor, expert):
            sizes = range(1, max(tensor, experts.count) + 1)
            fitting = ", ".join(str(size) for size in sizes if _can_divide_experts(experts, tensor, size))
            raise ConfigurationError(
                f"expert parallel size is {expert}, but the model has {experts.count} experts with an intermediate "
                f"size of {experts.intermediate_size}; use one of {fitting} with a tensor parallel size of {tensor}",
                field="expert",
            )
        if 0 < experts.shared_intermediate_size < ranks:
            raise ConfigurationError(
                f"{ranks} ranks share a layer, but its shared expert has an intermediate size of "
                f"{experts.shared_intermediate_size}; use tensor and expert parallel sizes up to that",
                field="expert" if expert > tensor else "tensor",
            )

    def _check_stages(self) -> None:
        sizes, layers = self.position.sizes, self.config.num_layers
        if sizes.pipeline > layers:
            raise ConfigurationError(
                f"pipeline parallel size is {sizes.pipeline}, but the model has {layers} layers; use {layers} or less",
                field="pipeline",
            )
        if sizes.stage_layers and sum(sizes.stage_layers) != layers:
            raise ConfigurationError(
                f"stage_layers are {list(sizes.stage_layers)}, {sum(sizes.stage_layers)} layers together, but the "
                f"model has {layers}; change their sum to that number",
                field="stage_layers",
            )


def _can_divide_experts(experts: ExpertsConfig, tensor: int, expert: int) -> bool:
    """Whether the experts can be divided into ``expert`` equal parts, and sliced as the tensor size requires."""
    fits_tensor = tensor % expert == 0 or expert % tensor == 0
    return fits_tensor and experts.count % expert == 0 and experts.intermediate_size >= max(tensor, expert) // expert
