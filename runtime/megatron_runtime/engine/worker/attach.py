"""Puts an engine to work for a coordinator, and starts the coordinator if this is the rank to do so."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from megatron_runtime.config import DEFAULT_MAX_REQUESTS
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.data_parallel_inference_coordinator.supervised_coordinator import SupervisedCoordinator
from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.engine.worker.follower_loop import FollowerLoop
from megatron_runtime.engine.worker.lock_step import LockStepEngine, lead, refuse_request_timeout
from megatron_runtime.engine.worker.protocol import AttachedLoop, RankEngine
from megatron_runtime.engine.worker.state_journal import StateJournal
from megatron_runtime.errors import CoordinatorError
from megatron_runtime.lifecycle import TARGET_OF_STATE, CoordinatorState
from megatron_runtime.parallel.timeouts import LOAD_TIMEOUT
from megatron_runtime.parallel.world import World
from megatron_runtime.processes.parent_link import EXIT_DRAINED
from megatron_runtime.processes.supervisor import ChildEnd, RestartBudget
from megatron_runtime.wire.security import KEY_VARIABLE

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
STOP_SECONDS = 5.0
MOST_RESTARTS = 10
_WHEN_ASKED_TO = (EXIT_DRAINED, -signal.SIGTERM)
"""How a coordinator ends that was told to; the signal itself ends one that is ending already."""


@dataclass(eq=False)
class AttachedEngine:
    """An engine at work for a coordinator."""

    address: str
    """Where the coordinator is."""
    key: str | None
    """What to show it."""
    loop: EngineLoop | FollowerLoop
    task: asyncio.Task[None]
    """Runs the loop."""
    reached: StateJournal
    """What the loop did."""
    coordinator: SupervisedCoordinator | None
    """On the rank that started it."""


async def attach_engine(
    engine: RankEngine,
    *,
    port: int | None = None,
    launch_coordinator: bool = True,
    hostname: str | None = None,
    key: str | None = None,
    schedule_output_path: str | None = None,
    prepare_thread: Callable[[], None] | None = None,
) -> AttachedEngine:
    """Put an engine to work, as a task of the running loop. With several ranks, every rank calls it.

    The first rank of each replica works for the coordinator; the others do what it does.

    Args:
        port: Of the coordinator; None lets a launched one choose.
        launch_coordinator: Rank 0 starts a coordinator process; False joins one that runs.
        hostname: Of the coordinator; None means loopback for one rank, and MASTER_ADDR for several.
        key: The shared secret; None takes MEGATRON_COORDINATOR_KEY, if there is one.
        schedule_output_path: File for a launched coordinator's routing decisions.
        prepare_thread: Called once in the thread that steps the engine.

    Raises:
        ConfigurationError: host needs a key, or is not this machine's; or no port to join at.
        CoordinatorError: The coordinator did not start.
        LostRankError: Other ranks did not come; they are named.
    """
    world = World.current(engine.ranks.position)
    await asyncio.to_thread(engine.ranks.barrier, "listen", LOAD_TIMEOUT)
    host = hostname or (os.environ.get("MASTER_ADDR", "127.0.0.1") if world.size > 1 else "127.0.0.1")
    key = key if key is not None else os.environ.get(KEY_VARIABLE)
    coordinator: SupervisedCoordinator | None = None
    address = f"{host}:{port}"
    if launch_coordinator:
        options = _coordinator_options(engine, world, host, port, schedule_output_path)
        coordinator, address = await _share_coordinator(engine, world, options, key)
    reached = StateJournal()
    loop, work = _make_loop(
        engine, world, address=address, key=key, prepare_thread=prepare_thread, on_state=reached.note
    )
    engine.attach(loop)
    return AttachedEngine(address, key, loop, asyncio.create_task(work), reached, coordinator)


async def _share_coordinator(
    engine: RankEngine, world: World, options: CoordinatorOptions, key: str | None
) -> tuple[SupervisedCoordinator | None, str]:
    """Rank 0 of the world starts the coordinator, and every rank returns its address."""
    coordinator: SupervisedCoordinator | None = None
    address, trouble = "", ""
    if world.is_primary:
        try:
            coordinator, address = await _launch_coordinator(options, key, lambda: _service_state(engine.attached_loop))
        except Exception as error:
            await asyncio.to_thread(world.share, (address, str(error)), "listen")
            raise
    address, trouble = await asyncio.to_thread(world.share, (address, trouble), "listen")
    if trouble:
        raise CoordinatorError(f"rank 0 of the world has no coordinator: {trouble}")
    return coordinator, address


def _make_loop(
    engine: RankEngine, world: World, *, address: str, key: str | None, **options: Any
) -> tuple[EngineLoop | FollowerLoop, Coroutine[Any, Any, None]]:
    """This rank's loop, and what runs it."""
    together: LockStepEngine | None = None
    if world.ranks_per_replica > 1:
        refuse_request_timeout(engine.config)
        if not engine.ranks.position.is_first:
            following = FollowerLoop(engine, engine.ranks, **options)
            return following, following.run()
        together = LockStepEngine(engine, engine.ranks, takes_tensors=True)
    loop = EngineLoop(together or engine, coordinator_address=address, replica_group=world.replica, key=key, **options)
    return loop, loop.run() if together is None else _lead(loop, together)


async def _lead(loop: EngineLoop, engine: LockStepEngine) -> None:
    try:
        await lead(loop, engine)
    except BaseException:
        await asyncio.to_thread(engine.leave)
        raise


def _service_state(loop: AttachedLoop | None) -> CoordinatorState:
    """The state of the service according to this rank's loop; RUNNING before the loop starts and after it stops."""
    target = None if loop is None else TARGET_OF_STATE.get(loop.state)
    return CoordinatorState.RUNNING if target is None or target is CoordinatorState.STOPPING else target


async def _launch_coordinator(
    options: CoordinatorOptions, key: str | None, current_state: Callable[[], CoordinatorState]
) -> tuple[SupervisedCoordinator, str]:
    """The coordinator and its address, once it listens. The first start must succeed; later failures cause restarts."""
    budget = RestartBudget(0)
    coordinator = SupervisedCoordinator(
        options,
        key=key,
        current_state=current_state,
        may_use_other_port=True,
        budget=budget,
        restart_success=False,
        log_level="WARNING",
        on_end=_note_end,
    )
    coordinator.start()
    try:
        address = await coordinator.wait_serving(START_SECONDS)
    except BaseException:
        await coordinator.close()
        raise
    budget.limit = MOST_RESTARTS
    return coordinator, address


def _note_end(end: ChildEnd) -> None:
    if end.exit_code not in _WHEN_ASKED_TO:
        logger.error("the coordinator is not started again: %s", end.message)


def _coordinator_options(
    engine: RankEngine, world: World, host: str, port: int | None, schedule_output_path: str | None
) -> CoordinatorOptions:
    config = engine.config
    return CoordinatorOptions(
        data_parallel_size=world.replicas,
        inference_coordinator_port=port,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        block_size_tokens=config.block_size_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_caching_coordinator_policy=config.prefix_caching_coordinator_policy,
        prefix_caching_routing_alpha=config.prefix_caching_routing_alpha,
        max_requests=config.max_requests or DEFAULT_MAX_REQUESTS,
        schedule_output_path=schedule_output_path,
        host=host,
        request_timeout=config.request_timeout or CoordinatorOptions.request_timeout,
    )


_attached: set[asyncio.Task[None]] = set()


async def start_listening(engine: RankEngine, **options: Any) -> str:
    """As `attach_engine`, for callers that stop engine and coordinator through a client.

    Returns:
        The coordinator's address.
    """
    attached = await attach_engine(engine, **options)

    async def end() -> None:
        await asyncio.gather(attached.task, return_exceptions=True)
        if attached.coordinator is not None and attached.loop.failure is not None:
            await attached.coordinator.stop(STOP_SECONDS)

    # The loop holds tasks by weak references only.
    task = asyncio.create_task(end())
    _attached.add(task)
    task.add_done_callback(_attached.discard)
    return attached.address
