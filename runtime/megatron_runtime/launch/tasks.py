"""The options and environments of the coordinator and the ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from megatron_runtime.config import DEFAULT_MAX_REQUESTS
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.memory import usable_cores
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.ports import LOOPBACK, RENDEZVOUS_PORT, free_loopback_port
from megatron_runtime.launch.preflight import EnginePlan
from megatron_runtime.launch.rank_options import RankOptions, RankPlan
from megatron_runtime.launch.routing_policy import coordinator_policy
from megatron_runtime.processes.child import ChildTask
from megatron_runtime.processes.spawning import INTERPRETERS, Spawner
from megatron_runtime.wire.security import key_environment

RANK_MODULE = "megatron_runtime.rank"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

# Large pages, and memory that is reused from one pass to the next, save a quarter of the time of a prompt's pass. The
# largest tensors are still mapped one by one, and code that releases memory calls malloc_trim, which returns all free
# memory of the main arena alone.
_MALLOC = ("hugetlb=1", "arena_max=1", f"mmap_threshold={32 << 20}", f"trim_threshold={1 << 30}", f"top_pad={64 << 20}")
# OpenMP threads spin only for the time between two operators and then sleep: on busy cores this takes a third of the
# time. Without the log level, torch warns about every rank whose address has no name.
_DEFAULTS = {
    "GOMP_SPINCOUNT": "1000",
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{setting}" for setting in _MALLOC),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def coordinator_options(options: LaunchOptions, port: int) -> CoordinatorOptions:
    """The options of the coordinator of this pod; ``port`` is the one that it listens on."""
    return CoordinatorOptions(
        host=options.private_host,
        inference_coordinator_port=port,
        data_parallel_size=options.replica_groups,
        prefix_caching_coordinator_policy=coordinator_policy(
            options.routing_policy, prefix_caching=options.engine.prefix_caching
        ),
        enable_prefix_caching=options.engine.prefix_caching,
        block_size_tokens=options.engine.block_size_tokens,
        prefix_caching_routing_alpha=options.routing_alpha,
        max_requests=options.engine.max_requests or DEFAULT_MAX_REQUESTS,
        request_timeout=options.request_timeout,
    )


PendingPlan = asyncio.Future[Mapping[str, Any]]
"""A serialized RankPlan, which is ready once the checkpoint was inspected. Ranks start before."""


def rank_plan(facts: CheckpointFacts, plan: EnginePlan, *, address: str) -> RankPlan:
    """The options of a rank that depend on the checkpoint; ``address`` is the coordinator's."""
    return RankPlan(
        coordinator_address=address,
        checkpoint=facts.path,
        max_sequence_length=plan.max_sequence_length,
        kv_cache_bytes=plan.kv_cache_bytes,
    )


def replica_group_tasks(
    options: LaunchOptions, plan: PendingPlan, *, ranks: range, key: str | None, spawner: Spawner
) -> list[ChildTask]:
    """The ranks of one replica group that this pod runs, for one start."""
    address = rendezvous_address(options)
    return [rank_task(options, plan, rank=rank, key=key, rendezvous=address, spawner=spawner) for rank in ranks]


def rendezvous_address(options: LaunchOptions) -> tuple[str, int] | None:
    """Host and port of the rendezvous of a replica group's ranks; within a pod, every start uses another port."""
    identity = options.identity
    if options.engine.ranks_per_replica_group == 1:
        return None
    if not options.spans_pods:
        return LOOPBACK, free_loopback_port()
    # In the first pod its own DNS name may not resolve yet, and is not an address to listen on.
    host = identity.bind_host if options.has_first_rank else identity.master_address
    assert host is not None
    return host, RENDEZVOUS_PORT


def rank_task(
    options: LaunchOptions,
    plan: PendingPlan | None = None,
    *,
    rank: int,
    key: str | None,
    rendezvous: tuple[str, int] | None = None,
    spawner: Spawner = INTERPRETERS,
) -> ChildTask:
    """One rank."""
    rank_options = RankOptions(
        rank=rank,
        replica_group=rank // options.engine.ranks_per_replica_group,
        attempt=options.identity.attempt,
        local_rank=rank - first_rank(options),
        rendezvous_address=rendezvous,
        rendezvous_timeout=options.rendezvous_timeout,
        drain_timeout=options.drain_timeout,
        engine=options.engine,
    )
    return ChildTask(
        role=f"rank {rank}",
        module=RANK_MODULE,
        options=rank_options.serialize(),
        environment=key_environment(key) | rank_environment(options),
        later=plan,
        spawner=spawner,
    )


def rank_environment(options: LaunchOptions) -> dict[str, str]:
    """Environment of all ranks of this pod that must be set when a process starts and before torch is imported."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads_per_rank(options))) | compute_environment()


def compute_environment() -> dict[str, str]:
    """Default environment of ranks; settings of the user have precedence."""
    defaults = {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    if "OMP_WAIT_POLICY" in os.environ:
        defaults.pop("GOMP_SPINCOUNT", None)
    return defaults


def first_rank(options: LaunchOptions) -> int:
    """The first of this pod's ranks, counted over all pods."""
    return options.identity.replica_group * options.engine.ranks_per_replica_group + options.first_rank_in_replica_group


def threads_per_rank(options: LaunchOptions) -> int:
    """Threads of a rank: its share of the cores, unless a flag sets it."""
    if options.threads_per_rank is not None:
        return options.threads_per_rank
    ranks = options.identity.local_ranks or options.local_ranks
    return max(usable_cores() // ranks, 1)
