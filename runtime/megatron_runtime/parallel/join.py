"""Joins the ranks of a replica group: creates its rendezvous, process groups and failure detector."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.parallel.failure_detector import FailureDetector
from megatron_runtime.parallel.gpu_collectives import without_error_handling
from megatron_runtime.parallel.interface import address_towards, use_interface_towards
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition
from megatron_runtime.parallel.multiple_ranks import MultipleRanks
from megatron_runtime.parallel.process_groups import ProcessGroups
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.parallel.rendezvous import Rendezvous
from megatron_runtime.parallel.single_rank import SingleRank
from megatron_runtime.parallel.timeouts import COLLECTIVE_TIMEOUT, RENDEZVOUS_TIMEOUT

_MESSAGE_BYTES = 256


def join_replica_group(
    position: RankPosition,
    *,
    host: str,
    port: int,
    key: str,
    attempt: int = 0,
    device_type: str = "cpu",
    timeout: float = COLLECTIVE_TIMEOUT,
    rendezvous_timeout: float = RENDEZVOUS_TIMEOUT,
) -> Ranks:
    """Join the other ranks of a replica group that is a separate world. A group of one rank starts nothing.

    Args:
        position: The place of this rank.
        host: Address of the group's first rank; on the first rank itself the address to listen on.
        port: Port of the first rank.
        key: Secret of the group; a rank with another one is not admitted.
        attempt: Number of this start of the group; ranks of another attempt are not joined.
        device_type: ``cpu``, or ``cuda`` with the current device of this rank.
        timeout: Seconds that another rank may be late in later operations.
        rendezvous_timeout: Seconds within which all ranks have to join.

    Raises:
        LostRankError: Some ranks, which it names, didn't join.
        ConfigurationError: The port can't be listened on.
    """
    if position.sizes.ranks_per_replica_group == 1:
        return SingleRank(position.replica_group)
    rendezvous = Rendezvous(position, host, port, key=key, attempt=attempt)
    store, limit = rendezvous.await_all(rendezvous_timeout), timedelta(seconds=timeout)
    store.set_timeout(limit)  # The longer time-out is only for ranks that may still have to be started.
    use_interface_towards(host)  # The name may have been unknown before.
    dist.init_process_group(
        "gloo",
        store=PrefixStore("torch", store),
        rank=position.rank,
        world_size=position.sizes.ranks_per_replica_group,
        timeout=limit,
    )
    groups = _make_groups([position.replica_group], position, device_type, limit, owns_world=True)
    address = address_towards(host) or host
    failure_detector = FailureDetector(rendezvous, position)
    return MultipleRanks(position, groups, failure_detector, address=address, device_type=device_type, timeout=timeout)


def replica_group_of_world(
    sizes: ParallelSizes, *, device_type: str = "cpu", timeout: float = COLLECTIVE_TIMEOUT
) -> Ranks:
    """This rank's replica group in a world over all groups, which the caller has initialized. Called on all ranks.

    Raises:
        ConfigurationError: The world is missing, or its size is not the one that ``sizes`` need.
    """
    if not dist.is_initialized() and sizes.world_size > 1:
        raise ConfigurationError(
            f"{sizes.world_size} ranks are configured, but torch.distributed has no world; call init_process_group on "
            "every rank before, as torchrun's programs do",
            field="world_size",
        )
    position = RankPosition(sizes)
    if dist.is_initialized():
        sizes.check_world(dist.get_world_size())
        position = sizes.position(dist.get_rank())
    if sizes.ranks_per_replica_group == 1:
        return SingleRank(position.replica_group)
    towards = os.environ.get("MASTER_ADDR", "127.0.0.1")
    use_interface_towards(towards)
    groups = _make_groups(range(sizes.data), position, device_type, timedelta(seconds=timeout), owns_world=False)
    address = address_towards(towards) or towards
    rendezvous = _open_rendezvous(position, address, groups)
    rendezvous.await_all(timeout)
    failure_detector = FailureDetector(rendezvous, position)
    return MultipleRanks(position, groups, failure_detector, address=address, device_type=device_type, timeout=timeout)


@without_error_handling()
def _make_groups(
    replica_groups: Iterable[int], mine: RankPosition, device_type: str, timeout: timedelta, *, owns_world: bool
) -> ProcessGroups:
    """The process groups of this rank. All ranks of torch's world create the groups of all ranks, as torch requires."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    size, stage, tensor = mine.sizes.ranks_per_replica_group, mine.sizes.ranks_per_stage, mine.sizes.tensor
    made: dict[int, ProcessGroups] = {}
    for place, replica_group in enumerate(replica_groups):
        ranks = range(place * size, (place + 1) * size)
        control = dist.new_group(ranks, timeout, "gloo")
        pipeline = dist.new_group(ranks, timeout, backend)
        layers = [dist.new_group(ranks[start : start + tensor], timeout, backend) for start in range(0, size, tensor)]
        stages = layers
        if stage != tensor:
            stages = [dist.new_group(ranks[start : start + stage], timeout, backend) for start in range(0, size, stage)]
        layer, experts = layers[mine.rank // tensor], stages[mine.stage]
        made[replica_group] = ProcessGroups(control, pipeline, layer, experts, ranks[0], owns_world)
    return made[mine.replica_group]


def _open_rendezvous(position: RankPosition, address: str, groups: ProcessGroups) -> Rendezvous:
    """A rendezvous for one replica group of several, whose address and key are broadcast in its process group."""
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    opened = None
    if position.is_first:
        key = secrets.token_hex()
        opened = Rendezvous(position, address, 0, key=key)
        text = f"{key} {opened.address}".encode()
        message.numpy()[: len(text)] = bytearray(text)
    dist.broadcast(message, groups.first, groups.control)
    if opened is not None:
        return opened
    key, _, address = message.numpy().tobytes().rstrip(b"\0").decode().partition(" ")
    host, _, port = address.rpartition(":")
    return Rendezvous(position, host, int(port), key=key)
