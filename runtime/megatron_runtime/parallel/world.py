"""One world over all replica groups, as torchrun starts it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.parallel.interface import use_interface_towards
from megatron_runtime.parallel.join import replica_group_of_world
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.parallel.rendezvous import StoreBarrier, meet_world
from megatron_runtime.parallel.timeouts import COLLECTIVE_TIMEOUT, LOAD_TIMEOUT, RENDEZVOUS_TIMEOUT

_synchronizations = count()
"""Distinguishes a synchronization from earlier ones: all ranks have the same ones in the same order."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_world(
    sizes: ParallelSizes | None = None,
    *,
    device_type: str = "cpu",
    timeout: float = COLLECTIVE_TIMEOUT,
    rendezvous_timeout: float = RENDEZVOUS_TIMEOUT,
) -> Ranks:
    """This rank's replica group in the world that torchrun started or the caller has initialized; for `load_model`.

    The number of replica groups follows from the size of the world. Called on all ranks, with the same sizes.

    Args:
        sizes: How a replica group divides the model; None means that every rank has a whole one.
        device_type: ``cpu``, or ``cuda``, where torchrun's local rank selects the device.
        timeout: Seconds that another rank of the replica group may be late in later operations.
        rendezvous_timeout: Seconds within which all ranks of the world have to join.

    Raises:
        ConfigurationError: The world is missing, or its size does not fit these sizes.
        LostRankError: Some ranks of the world or of the replica group, which it names, didn't join.
    """
    if device_type == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    wanted = sizes or ParallelSizes()
    if dist.is_initialized():
        wanted = wanted.filling(dist.get_world_size())
        World(dist.get_rank(), dist.get_world_size()).meet("join_world", rendezvous_timeout)
    elif all(name in os.environ for name in _TORCHRUN):
        # Checked before the ranks connect: a rank that fails later would break the connections of the others.
        wanted = wanted.filling(int(os.environ["WORLD_SIZE"]))
        _join_torchrun(rendezvous_timeout)
    return replica_group_of_world(wanted, device_type=device_type, timeout=timeout)


def _join_torchrun(timeout: float) -> None:
    """Like ``init_process_group``, but with a time limit, and an error that names the missing ranks."""
    rank, size, host, port = (os.environ[name] for name in _TORCHRUN)
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = meet_world(int(rank), int(size), host, int(port), timeout=timeout, is_kept=is_kept)
    use_interface_towards(host)
    dist.init_process_group("gloo", store=PrefixStore("torch", store), rank=int(rank), world_size=int(size))


@dataclass(frozen=True)
class World:
    """This process among those that torch.distributed started together; the only one without torch.distributed."""

    rank: int
    size: int
    ranks_per_replica_group: int = 1

    @classmethod
    def current(cls, position: RankPosition | None = None) -> World:
        """The world of torch.distributed, for a rank with this place in its replica group.

        Raises:
            ConfigurationError: The replica group is not in this world.
        """
        position = position or RankPosition()
        found = cls(0, 1)
        if dist.is_available() and dist.is_initialized():
            found = cls(dist.get_rank(), dist.get_world_size(), position.sizes.ranks_per_replica_group)
        position.sizes.filling(found.size)
        if found.rank % found.ranks_per_replica_group != position.rank:
            raise ConfigurationError(
                f"the model's part is that of rank {position.rank} of a replica group, but rank {found.rank} of this "
                f"world is rank {found.rank % found.ranks_per_replica_group} of its group; load the model with the "
                "ranks of join_world",
                field="model",
            )
        return found

    @property
    def is_primary(self) -> bool:
        """Whether this is global rank 0."""
        return self.rank == 0

    @property
    def replica_group(self) -> int:
        """Index of this rank's replica group: its data parallel rank."""
        return self.rank // self.ranks_per_replica_group

    @property
    def replica_groups(self) -> int:
        """Number of replica groups."""
        return self.size // self.ranks_per_replica_group

    def meet(self, occasion: str, timeout: float) -> Store:
        """Wait until all ranks have called this. Raises LostRankError with the missing ranks after ``timeout`` seconds.

        To be called before operations in which torch would wait by itself, for half an hour and without naming ranks.

        Returns:
            A store for this synchronization.
        """
        place = PrefixStore(f"synchronization/{next(_synchronizations)}", distributed_c10d._get_default_store())
        StoreBarrier(self.rank, self.size, f"rank {self.rank} of the world, at {occasion}", timeout).await_all(place)
        return place

    def share(self, value: Any, occasion: str) -> Any:
        """Rank 0's value, on every rank. All ranks call it. Raises LostRankError like `meet`, after the time to load a
        model.
        """
        if self.size == 1:
            return value
        self.meet(occasion, LOAD_TIMEOUT)
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]
