"""The layout of the ranks: pure arithmetic, without a device or a process.

A replica group holds one copy of the model, on pipeline x max(tensor, expert) ranks. The tensor rank varies fastest,
then the pipeline stage, then the replica group. There are two kinds of worlds: one over all replica groups (torchrun),
and one per replica group, whose index is configured (Kubernetes, the launcher).

Megatron Core lays the ranks of a stage out twice, in the same order: for dense layers as tensor x data, for experts as
expert tensor x expert x expert data. A replica group is the smallest stage that holds both layouts. With tensor size t
and expert size e, of which one divides the other, that is max(t, e) ranks, with an expert tensor size of max(t, e) / e:

* e <= t: the t ranks form e groups of t / e. A group holds its share of the experts, and each of its ranks a slice of
  each. With e = t every expert is whole on one rank, with e = 1 every expert is sliced t times.
* e > t: each rank holds its share of the experts whole. There are e / t copies of the dense layers, on t ranks each; in
  Megatron these copies are data parallel ranks. Here they belong to one replica group and process the same requests.

In both cases the results of the ranks' experts are summed over the stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_runtime.errors import ConfigurationError


@dataclass(frozen=True)
class ParallelSizes:
    """The parallel sizes. Raises ConfigurationError with field, value and remedy."""

    tensor: int = 1
    """Ranks that share each layer."""
    pipeline: int = 1
    """Stages that the layers are divided into."""
    expert: int = 1
    """Parts that the experts of a layer are divided into; divides ``tensor``, or is a multiple of it."""
    data: int = 1
    """Replica groups."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage. Empty: divided evenly, with the remainder in the first stages."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "data"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ConfigurationError(
                    f"{name} parallel size is {size!r}, expected a whole number of at least 1", field=name
                )
        if self.stage_layers and (len(self.stage_layers) != self.pipeline or min(self.stage_layers) < 1):
            raise ConfigurationError(
                f"stage_layers is {list(self.stage_layers)}, expected {self.pipeline} numbers of at least 1, one for "
                "each stage of the pipeline",
                field="stage_layers",
            )
        if self.tensor % self.expert and self.expert % self.tensor:
            fitting = ", ".join(str(size) for size in range(1, self.tensor + 1) if self.tensor % size == 0)
            raise ConfigurationError(
                f"expert parallel size is {self.expert}, which is neither a divisor nor a multiple of the "
                f"{self.tensor} tensor parallel ranks; use one of {fitting}, or a multiple of {self.tensor}",
                field="expert",
            )

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one pipeline stage."""
        return max(self.tensor, self.expert)

    @property
    def ranks_per_replica_group(self) -> int:
        """Ranks of one replica group."""
        return self.ranks_per_stage * self.pipeline

    @property
    def factors(self) -> str:
        """The factors of ``ranks_per_replica_group``, for messages."""
        name = "tensor" if self.tensor >= self.expert else "expert"
        return f"{name} {self.ranks_per_stage} x pipeline {self.pipeline}"

    @property
    def world_size(self) -> int:
        """Ranks of all replica groups."""
        return self.ranks_per_replica_group * self.data

    def check_world(self, world_size: int) -> None:
        """Raise ConfigurationError unless a world over all replica groups has the size that these sizes need."""
        if world_size != self.world_size:
            raise ConfigurationError(
                f"the world has {world_size} ranks, but {self.factors} x data {self.data} need {self.world_size}; "
                "start that number of ranks, or change a size",
                field="world_size",
            )

    def filling(self, world_size: int) -> ParallelSizes:
        """These sizes with the number of replica groups that fit such a world, unless ``data`` is set.

        Raises:
            ConfigurationError: The world has too few or too many ranks.
        """
        groups, left = divmod(world_size, self.ranks_per_replica_group)
        if left and self.data == 1:
            raise ConfigurationError(
                f"the world has {world_size} ranks, but {self.factors} take {self.ranks_per_replica_group} for each "
                "replica group; start a multiple of that, or change a size",
                field="world_size",
            )
        filled = replace(self, data=groups) if self.data == 1 else self
        filled.check_world(world_size)
        return filled

    def position(self, world_rank: int) -> RankPosition:
        """The place of a rank in a world over all replica groups."""
        if not 0 <= world_rank < self.world_size:
            raise ConfigurationError(
                f"rank is {world_rank}, expected 0 to {self.world_size - 1} in a world of {self.world_size}",
                field="rank",
            )
        return RankPosition(self, *reversed(divmod(world_rank, self.ranks_per_replica_group)))

    def position_in_replica_group(self, rank: int, replica_group: int = 0) -> RankPosition:
        """The place of a rank in the world of one replica group; ``replica_group`` is its data parallel rank.

        The index may exceed ``data``, because replica groups can be added while others serve.
        """
        if not 0 <= rank < self.ranks_per_replica_group:
            raise ConfigurationError(
                f"rank is {rank}, expected 0 to {self.ranks_per_replica_group - 1}, since {self.factors} are "
                f"{self.ranks_per_replica_group} ranks",
                field="rank",
            )
        if replica_group < 0:
            raise ConfigurationError(f"replica group is {replica_group}, expected 0 or more", field="replica_group")
        return RankPosition(self, rank, replica_group)


@dataclass(frozen=True)
class RankPosition:
    """The place of one rank. ``rank`` counts within the replica group."""

    sizes: ParallelSizes = ParallelSizes()
    rank: int = 0
    replica_group: int = 0
    """The data parallel rank."""

    def __str__(self) -> str:
        return f"{self.name} of replica group {self.replica_group}"

    @property
    def name(self) -> str:
        """The rank and its coordinates in the replica group, for messages."""
        expert = f", expert {self.expert_group}" if self.sizes.expert > self.sizes.tensor else ""
        return f"rank {self.rank} (tensor {self.tensor_rank}{expert}, stage {self.stage})"

    @property
    def stage(self) -> int:
        """Index of the pipeline stage."""
        return self.rank // self.sizes.ranks_per_stage

    @property
    def stage_rank(self) -> int:
        """Index among the ranks of the stage."""
        return self.rank % self.sizes.ranks_per_stage

    @property
    def tensor_rank(self) -> int:
        """Index among the ranks that share this rank's dense layers."""
        return self.stage_rank % self.sizes.tensor

    @property
    def dense_copy(self) -> int:
        """Index of the copy of the stage's dense layers that this rank belongs to."""
        return self.stage_rank // self.sizes.tensor

    @property
    def expert_group(self) -> int:
        """Index of this rank's share of a layer's experts."""
        return self.stage_rank // self.expert_slices

    @property
    def expert_slice(self) -> int:
        """Index of this rank's slice of each of its experts."""
        return self.stage_rank % self.expert_slices

    @property
    def expert_slices(self) -> int:
        """Slices of each expert."""
        return self.sizes.ranks_per_stage // self.sizes.expert

    @property
    def stage_peers(self) -> range:
        """Ranks of the replica group that share this rank's experts, including itself."""
        start = self.stage * self.sizes.ranks_per_stage
        return range(start, start + self.sizes.ranks_per_stage)

    @property
    def tensor_peers(self) -> range:
        """Ranks of the replica group that share this rank's dense layers, including itself."""
        start = self.rank - self.tensor_rank
        return range(start, start + self.sizes.tensor)

    @property
    def others(self) -> list[int]:
        """All other ranks of the replica group."""
        return [rank for rank in range(self.sizes.ranks_per_replica_group) if rank != self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank receives the requests of the replica group."""
        return self.rank == 0

    @property
    def is_primary(self) -> bool:
        """Whether this is global rank 0."""
        return self.is_first and self.replica_group == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is in the last stage."""
        return self.stage == self.sizes.pipeline - 1

    @property
    def computes_logits(self) -> bool:
        """Whether this rank has a part of the head, which one copy of the last stage's dense layers has."""
        return self.is_last_stage and self.dense_copy == 0

    @property
    def samples(self) -> bool:
        """Whether this rank samples the tokens of the replica group."""
        return self.rank == self.sampler

    @property
    def sampler(self) -> int:
        """The rank that samples: the first of the last stage."""
        return self.sizes.ranks_per_replica_group - self.sizes.ranks_per_stage


def share(total: int, parts: int, index: int) -> range:
    """Chunk ``index`` of ``parts`` chunks of ``range(total)``, whose sizes differ by at most one; longer ones first."""
    size, longer = divmod(total, parts)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))
