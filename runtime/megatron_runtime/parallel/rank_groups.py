"""The groups that a rank belongs to, by the names of Megatron's process groups."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.world import World


@dataclass(frozen=True)
class RankGroup:
    """The place of this rank in one group. Reads like a torch.distributed.ProcessGroup; has no collectives."""

    index: int
    count: int

    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.index

    def size(self) -> int:
        """Number of ranks in the group."""
        return self.count


@dataclass(frozen=True)
class RankGroups:
    """The groups of one rank."""

    tp: RankGroup
    """Ranks that share the dense layers of a stage."""
    pp: RankGroup
    """Stages."""
    mp: RankGroup
    """All ranks of one replica group."""
    ep: RankGroup
    """Parts of the experts of a layer."""
    dp: RankGroup
    """Replica groups."""

    @classmethod
    def of(cls, position: RankPosition) -> RankGroups:
        """The groups of the rank with this place, in the present world.

        Raises:
            ConfigurationError: The replica group is not in this world.
        """
        sizes, world = position.sizes, World.current(position)
        return cls(
            tp=RankGroup(position.tensor_rank, sizes.tensor),
            pp=RankGroup(position.stage, sizes.pipeline),
            mp=RankGroup(position.rank, sizes.ranks_per_replica_group),
            ep=RankGroup(position.expert_group, sizes.expert),
            dp=RankGroup(world.replica_group, world.replica_groups),
        )
