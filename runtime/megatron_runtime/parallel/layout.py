"""Who is who among the ranks: pure arithmetic, without a device or a process.

A replica is one copy of the model, on pipeline x max(tensor, expert) ranks. The tensor rank turns fastest, then the
stage of the pipeline, then the replica. There are two worlds: one over all replicas (torchrun), and one per replica
that is told from outside which one it is (Kubernetes, the launcher).

Megatron Core lays the same ranks of a stage out twice, in the same order: for dense layers as tensor x data, for
experts as expert tensor x expert x expert data. A replica is the smallest stage that both fit in. With tensor size t
and expert size e, of which one divides the other, that is max(t, e) ranks, with an expert tensor size of max(t, e) / e:

* e <= t: the t ranks form e groups of t / e. A group holds its share of the experts, and each of its ranks a slice of
  each. With e = t every expert lies whole on one rank, with e = 1 every expert is sliced t times.
* e > t: each rank holds its share of the experts whole. The dense layers are there e / t times, on t ranks each; in
  Megatron these copies are data parallel ranks. Here they belong to one replica and process the same requests.

Either way the results that the ranks of a stage compute from their experts are parts of one sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_runtime.errors import ConfigurationError


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks share what. ConfigurationError names the field, its value and the mend."""

    tensor: int = 1
    """Ranks that share each layer."""
    pipeline: int = 1
    """Stages that the layers are spread over."""
    expert: int = 1
    """Parts that the experts of a layer are divided into; divides ``tensor``, or is a multiple of it."""
    data: int = 1
    """Copies of the model."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: as even as can be, the first ones with one more."""

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
        """Ranks of one stage of the pipeline."""
        return max(self.tensor, self.expert)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one copy of the model."""
        return self.ranks_per_stage * self.pipeline

    @property
    def factors(self) -> str:
        """What ``ranks_per_replica`` is the product of, for messages."""
        name = "tensor" if self.tensor >= self.expert else "expert"
        return f"{name} {self.ranks_per_stage} x pipeline {self.pipeline}"

    @property
    def world_size(self) -> int:
        """Ranks of all copies."""
        return self.ranks_per_replica * self.data

    def check_world(self, world_size: int) -> None:
        """Raise ConfigurationError unless a world over all replicas has as many ranks as these sizes need."""
        if world_size != self.world_size:
            raise ConfigurationError(
                f"the world has {world_size} ranks, but {self.factors} x data {self.data} need {self.world_size}; "
                "start as many, or change a size",
                field="world_size",
            )

    def filling(self, world_size: int) -> ParallelSizes:
        """These sizes with as many copies as such a world has ranks for, unless ``data`` says how many.

        Raises:
            ConfigurationError: Ranks would be missing or left over.
        """
        copies, left = divmod(world_size, self.ranks_per_replica)
        if left and self.data == 1:
            raise ConfigurationError(
                f"the world has {world_size} ranks, but {self.factors} take {self.ranks_per_replica} for each copy of "
                "the model; start a multiple of that, or change a size",
                field="world_size",
            )
        filled = replace(self, data=copies) if self.data == 1 else self
        filled.check_world(world_size)
        return filled

    def position(self, world_rank: int) -> RankPosition:
        """The place of a rank in a world over all replicas."""
        if not 0 <= world_rank < self.world_size:
            raise ConfigurationError(
                f"rank is {world_rank}, expected 0 to {self.world_size - 1} in a world of {self.world_size}",
                field="rank",
            )
        return RankPosition(self, *reversed(divmod(world_rank, self.ranks_per_replica)))

    def position_in_replica(self, rank: int, replica: int = 0) -> RankPosition:
        """The place of a rank in the world of one replica; ``replica`` is its data parallel rank.

        There may be more replicas than ``data`` says, since they come and go while others serve.
        """
        if not 0 <= rank < self.ranks_per_replica:
            raise ConfigurationError(
                f"rank is {rank}, expected 0 to {self.ranks_per_replica - 1}, since {self.factors} are "
                f"{self.ranks_per_replica} ranks",
                field="rank",
            )
        if replica < 0:
            raise ConfigurationError(f"data parallel rank is {replica}, expected 0 or more", field="replica")
        return RankPosition(self, rank, replica)


@dataclass(frozen=True)
class RankPosition:
    """One rank's place. ``rank`` counts within the replica."""

    sizes: ParallelSizes = ParallelSizes()
    rank: int = 0
    replica: int = 0
    """The data parallel rank."""

    def __str__(self) -> str:
        return f"{self.name} of replica {self.replica}"

    @property
    def name(self) -> str:
        """The rank and its coordinates in the replica, for messages."""
        expert = f", expert {self.expert_group}" if self.sizes.expert > self.sizes.tensor else ""
        return f"rank {self.rank} (tensor {self.tensor_rank}{expert}, stage {self.stage})"

    @property
    def stage(self) -> int:
        """Place in the pipeline."""
        return self.rank // self.sizes.ranks_per_stage

    @property
    def stage_rank(self) -> int:
        """Place among the ranks of the stage."""
        return self.rank % self.sizes.ranks_per_stage

    @property
    def tensor_rank(self) -> int:
        """Place among the ranks that share this one's dense layers."""
        return self.stage_rank % self.sizes.tensor

    @property
    def dense_copy(self) -> int:
        """Which copy of the stage's dense layers this rank holds a part of."""
        return self.stage_rank // self.sizes.tensor

    @property
    def expert_group(self) -> int:
        """Which share of a layer's experts is here."""
        return self.stage_rank // self.expert_slices

    @property
    def expert_slice(self) -> int:
        """Which slice of each of them."""
        return self.stage_rank % self.expert_slices

    @property
    def expert_slices(self) -> int:
        """Slices that an expert is cut into."""
        return self.sizes.ranks_per_stage // self.sizes.expert

    @property
    def stage_peers(self) -> range:
        """Ranks of the replica that share this one's experts, this one among them."""
        start = self.stage * self.sizes.ranks_per_stage
        return range(start, start + self.sizes.ranks_per_stage)

    @property
    def tensor_peers(self) -> range:
        """Ranks of the replica that share this one's dense layers, this one among them."""
        start = self.rank - self.tensor_rank
        return range(start, start + self.sizes.tensor)

    @property
    def others(self) -> list[int]:
        """All other ranks of the replica."""
        return [rank for rank in range(self.sizes.ranks_per_replica) if rank != self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the replica's requests in."""
        return self.rank == 0

    @property
    def is_primary(self) -> bool:
        """Whether this is global rank 0."""
        return self.is_first and self.replica == 0

    @property
    def is_first_stage(self) -> bool:
        """Whether tokens are embedded here."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank hands its activations to no other."""
        return self.stage == self.sizes.pipeline - 1

    @property
    def computes_logits(self) -> bool:
        """Whether a part of the head is here: one copy of the last stage's dense layers has it."""
        return self.is_last_stage and self.dense_copy == 0

    @property
    def samples(self) -> bool:
        """Whether this rank chooses the replica's tokens."""
        return self.rank == self.sampler

    @property
    def sampler(self) -> int:
        """The rank of the replica that does: the first of the last stage."""
        return self.sizes.ranks_per_replica - self.sizes.ranks_per_stage


def share(total: int, parts: int, index: int) -> range:
    """The ``index``-th of ``parts`` chunks of ``range(total)``, which differ by at most one; longer ones first."""
    size, longer = divmod(total, parts)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))
