"""One world over all replicas, as torchrun starts it."""

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
from megatron_runtime.parallel.join import replica_of_world
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.parallel.rendezvous import StoreBarrier, meet_world
from megatron_runtime.parallel.timeouts import COLLECTIVE_TIMEOUT, LOAD_TIMEOUT, RENDEZVOUS_TIMEOUT

_meetings = count()
"""Tells a meeting from those before it: all ranks come to the same ones, in the same order."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_world(
    sizes: ParallelSizes | None = None,
    *,
    device_type: str = "cpu",
    timeout: float = COLLECTIVE_TIMEOUT,
    rendezvous_timeout: float = RENDEZVOUS_TIMEOUT,
) -> Ranks:
    """This rank's replica in the world that torchrun started, or that the caller has initialised; for `load_model`.

    There are as many copies of the model as the world has ranks for. To be called on all ranks, with the same sizes.

    Args:
        sizes: How a copy is divided; None means that every rank has a whole one.
        device_type: ``cpu``, or ``cuda``, where torchrun's local rank chooses the device.
        timeout: Seconds that another rank of the replica may be late in anything later.
        rendezvous_timeout: Seconds within which all ranks of the world have to come.

    Raises:
        ConfigurationError: The world has another size than these sizes need, or there is none.
        LostRankError: Ranks of the world or of the replica didn't come; they are named.
    """
    if device_type == "cuda" and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    wanted = sizes or ParallelSizes()
    if dist.is_initialized():
        wanted = wanted.filling(dist.get_world_size())
        World(dist.get_rank(), dist.get_world_size()).meet("join_world", rendezvous_timeout)
    elif all(name in os.environ for name in _TORCHRUN):
        # Before the ranks connect: one that refuses and goes would break the connections of those still at it.
        wanted = wanted.filling(int(os.environ["WORLD_SIZE"]))
        _join_torchrun(rendezvous_timeout)
    return replica_of_world(wanted, device_type=device_type, timeout=timeout)


def _join_torchrun(timeout: float) -> None:
    """As ``init_process_group`` does alone, but for naming who is missing, and when."""
    rank, size, host, port = (os.environ[name] for name in _TORCHRUN)
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = meet_world(int(rank), int(size), host, int(port), timeout=timeout, is_kept=is_kept)
    use_interface_towards(host)
    dist.init_process_group("gloo", store=PrefixStore("torch", store), rank=int(rank), world_size=int(size))


@dataclass(frozen=True)
class World:
    """This process among those that torch.distributed started together; alone if it did not."""

    rank: int
    size: int
    ranks_per_replica: int = 1

    @classmethod
    def current(cls, position: RankPosition | None = None) -> World:
        """As torch.distributed says, for a rank that has this place in its replica.

        Raises:
            ConfigurationError: The replica is not one of this world.
        """
        position = position or RankPosition()
        found = cls(0, 1)
        if dist.is_available() and dist.is_initialized():
            found = cls(dist.get_rank(), dist.get_world_size(), position.sizes.ranks_per_replica)
        position.sizes.filling(found.size)
        if found.rank % found.ranks_per_replica != position.rank:
            raise ConfigurationError(
                f"the model's part is that of rank {position.rank} of a replica, but rank {found.rank} of this world "
                f"is rank {found.rank % found.ranks_per_replica} of its replica; load it with the ranks of join_world",
                field="model",
            )
        return found

    @property
    def is_primary(self) -> bool:
        """Whether this is global rank 0."""
        return self.rank == 0

    @property
    def replica(self) -> int:
        """Which copy of the model this rank has a part of: its data parallel rank."""
        return self.rank // self.ranks_per_replica

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.size // self.ranks_per_replica

    def meet(self, occasion: str, timeout: float) -> Store:
        """Wait until all ranks are here; LostRankError names those who aren't after ``timeout`` seconds.

        Before anything that torch waits for by itself: it takes half an hour, and says how many.

        Returns:
            A store of this meeting's own.
        """
        place = PrefixStore(f"meeting/{next(_meetings)}", distributed_c10d._get_default_store())
        StoreBarrier(self.rank, self.size, f"rank {self.rank} of the world, at {occasion}", timeout).await_all(place)
        return place

    def share(self, value: Any, occasion: str) -> Any:
        """Rank 0's value, on every rank; all ranks call it. LostRankError as by `meet`, in the time to load a model."""
        if self.size == 1:
            return value
        self.meet(occasion, LOAD_TIMEOUT)
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]
