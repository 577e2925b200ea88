"""Attaches an engine to a coordinator, and starts the coordinator on rank 0 of the world."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from megatron_runtime.config import DEFAULT_MAX_REQUESTS
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.data_parallel_inference_coordinator.supervised_coordinator import SupervisedCoordinator
from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.engine.worker.follower_loop import FollowerLoop
from megatron_runtime.engine.worker.lock_step import LockStepEngine, refuse_request_timeout, run_in_lock_step
from megatron_runtime.engine.worker.protocol import AttachedLoop, RankEngine
from megatron_runtime.engine.worker.state_journal import StateJournal
from megatron_runtime.errors import CoordinatorError, EngineError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.lifecycle import TARGET_OF_STATE, CoordinatorState
from megatron_runtime.parallel.timeouts import LOAD_TIMEOUT
from megatron_runtime.parallel.world import World
from megatron_runtime.processes.parent_link import EXIT_DRAINED
from megatron_runtime.processes.supervisor import ChildEnd, RestartBudget
from megatron_runtime.wire.key_files import forget_key, generate_key, remember_key
from megatron_runtime.wire.security import KEY_VARIABLE, coordinator_address

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
STOP_SECONDS = 5.0
READY_SECONDS = 120.0
"""For the engines of all replica groups to register."""
MAX_RESTARTS = 10
_NORMAL_EXITS = (EXIT_DRAINED, -signal.SIGTERM)
"""Exit codes of a coordinator that was stopped; the signal itself ends one that is already ending."""


@dataclass(eq=False)
class AttachedEngine:
    """An engine that serves a coordinator's requests."""

    address: str
    """Address of the coordinator."""
    key: str | None
    """The shared secret of the coordinator; None: its socket is plain, or `find_key` finds it."""
    loop: EngineLoop | FollowerLoop
    task: asyncio.Task[None]
    """Runs the loop."""
    reached: StateJournal
    """The states that the engine has reached."""
    coordinator: SupervisedCoordinator | None
    """On the rank that has started it, else None."""


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
    """Run an engine for a coordinator, as a task of the running event loop. With several ranks, every rank calls it.

    The first rank of each replica group connects to the coordinator; its other ranks are followers.

    Args:
        port: Port of the coordinator; None lets a launched one choose.
        launch_coordinator: Rank 0 starts a coordinator process; False connects to a running one.
        hostname: Host of the coordinator; None: loopback for one rank, and MASTER_ADDR for several.
        key: The shared secret. None: MEGATRON_COORDINATOR_KEY, or else a launched coordinator generates one, which
            `InferenceClient` finds in processes of the same user on this machine and in those of the ranks.
        schedule_output_path: File for the routing decisions of a launched coordinator.
        prepare_thread: Called once in the thread that steps the engine.

    Raises:
        ConfigurationError: The host needs a key or is no address of this machine, or the port is missing.
        CoordinatorError: The coordinator did not start.
        LostRankError: Other ranks are missing; the error names them.
    """
    world = World.current(engine.ranks.position)
    await asyncio.to_thread(engine.ranks.barrier, "listen", LOAD_TIMEOUT)
    host = hostname or (os.environ.get("MASTER_ADDR", "127.0.0.1") if world.size > 1 else "127.0.0.1")
    key = key if key is not None else os.environ.get(KEY_VARIABLE)
    coordinator: SupervisedCoordinator | None = None
    address = f"{host}:{port}"
    if launch_coordinator:
        options = _coordinator_options(engine, world, host, port, schedule_output_path)
        coordinator, address, key = await _share_coordinator(engine, world, options, key)
        remember_key(address, key)
    reached = StateJournal()
    loop, work = _make_loop(
        engine, world, address=address, key=key, prepare_thread=prepare_thread, on_state=reached.note
    )
    task = asyncio.create_task(work)
    task.add_done_callback(lambda _: forget_key(address))
    engine.attach(loop, task)
    return AttachedEngine(address, key, loop, task, reached, coordinator)


async def _share_coordinator(
    engine: RankEngine, world: World, options: CoordinatorOptions, key: str | None
) -> tuple[SupervisedCoordinator | None, str, str]:
    """Start the coordinator on rank 0 of the world, and return its address and its key on every rank."""
    coordinator: SupervisedCoordinator | None = None
    address, failure = "", ""
    if world.is_primary:
        try:
            coordinator, address, key = await _launch_coordinator(
                options, key, lambda: _service_state(engine.attached_loop)
            )
        except Exception as error:
            await asyncio.to_thread(world.share, ("", "", str(error)), "listen")
            raise
    address, key, failure = await asyncio.to_thread(world.share, (address, key, failure), "listen")
    if failure:
        raise CoordinatorError(f"rank 0 of the world could not start the coordinator: {failure}")
    assert key is not None
    return coordinator, address, key


def _make_loop(
    engine: RankEngine, world: World, *, address: str, key: str | None, **options: Any
) -> tuple[EngineLoop | FollowerLoop, Coroutine[Any, Any, None]]:
    """The loop of this rank, and the coroutine that runs it."""
    lock_step: LockStepEngine | None = None
    if world.ranks_per_replica_group > 1:
        refuse_request_timeout(engine.config)
        if not engine.ranks.position.is_first:
            follower = FollowerLoop(engine, engine.ranks, **options)
            return follower, follower.run()
        lock_step = LockStepEngine(engine, engine.ranks, accepts_tensors=True)
    loop = EngineLoop(
        lock_step or engine, coordinator_address=address, replica_group=world.replica_group, key=key, **options
    )
    return loop, loop.run() if lock_step is None else _run_in_lock_step(loop, lock_step)


async def _run_in_lock_step(loop: EngineLoop, engine: LockStepEngine) -> None:
    try:
        await run_in_lock_step(loop, engine)
    except BaseException:
        await asyncio.to_thread(engine.disconnect)
        raise


def _service_state(loop: AttachedLoop | None) -> CoordinatorState:
    """The state of the service according to this rank's loop; RUNNING before the loop starts and after it stops."""
    target = None if loop is None else TARGET_OF_STATE.get(loop.state)
    return CoordinatorState.RUNNING if target is None or target is CoordinatorState.STOPPING else target


async def _launch_coordinator(
    options: CoordinatorOptions, key: str | None, current_state: Callable[[], CoordinatorState]
) -> tuple[SupervisedCoordinator, str, str]:
    """The coordinator, its address and its key, once it listens.

    The first start must succeed; later failures cause restarts.
    """
    budget = RestartBudget(0)
    used = generate_key() if key is None else key
    coordinator = SupervisedCoordinator(
        options,
        key=used,
        publishes_key=key is None,
        current_state=current_state,
        may_use_other_port=True,
        budget=budget,
        restart_success=False,
        log_level="WARNING",
        on_end=_log_end,
    )
    coordinator.start()
    try:
        address = await coordinator.wait_serving(START_SECONDS)
    except BaseException:
        await coordinator.close()
        raise
    budget.limit = MAX_RESTARTS
    return coordinator, address, used


def _log_end(end: ChildEnd) -> None:
    if end.exit_code not in _NORMAL_EXITS:
        logger.error("the coordinator is not restarted: %s", end.message)


def _coordinator_options(
    engine: RankEngine, world: World, host: str, port: int | None, schedule_output_path: str | None
) -> CoordinatorOptions:
    config = engine.config
    return CoordinatorOptions(
        data_parallel_size=world.replica_groups,
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
_engines: WeakValueDictionary[str, RankEngine] = WeakValueDictionary()


def engine_at(address: str) -> RankEngine | None:
    """The engine of this process that was last attached to the coordinator at this address, if there is one."""
    return _engines.get(coordinator_address(address))


async def wait_for_engines(client: InferenceClient, count: int, raise_failure: Callable[[], None]) -> None:
    """Wait until this number of engines serve the coordinator's requests.

    Args:
        client: A client that is connected.
        raise_failure: Raises the failure of this rank's engine, if there is one; called at least once a second.

    Raises:
        CoordinatorError: Too few engines registered within READY_SECONDS.
    """
    state = await client.service_state()
    ends_at = time.monotonic() + READY_SECONDS
    while (ready := sum(engine.ready for engine in state.engines)) < count:
        raise_failure()
        if time.monotonic() > ends_at:
            raise CoordinatorError(f"{ready} of {count} engines are ready after {READY_SECONDS:.0f} s")
        state = await client.wait_for_state_change(state.revision, 1.0)


async def start_listening(engine: RankEngine, **options: Any) -> str:
    """As `attach_engine`, for callers that stop engine and coordinator by a client.

    As in Megatron, the rank that starts the coordinator returns when the engines of all replica groups are registered:
    an engine that registers later takes the state of the service, and may miss the states that callers wait for.

    Returns:
        The address of the coordinator.

    Raises:
        EngineError: This rank's engine failed before.
        CoordinatorError: Not all engines registered in time.
    """
    attached = await attach_engine(engine, **options)
    _engines[coordinator_address(attached.address)] = engine

    async def end() -> None:
        await asyncio.gather(attached.task, return_exceptions=True)
        if attached.coordinator is not None and attached.loop.failure is not None:
            await attached.coordinator.stop(STOP_SECONDS)

    # The event loop keeps only weak references to tasks.
    task = asyncio.create_task(end())
    _attached.add(task)
    task.add_done_callback(_attached.discard)
    if attached.coordinator is not None:
        await _wait_for_all(attached, attached.coordinator, World.current(engine.ranks.position).replica_groups)
    return attached.address


async def _wait_for_all(attached: AttachedEngine, coordinator: SupervisedCoordinator, count: int) -> None:
    """End the engine and its coordinator if not all engines register."""

    def raise_failure() -> None:
        if attached.task.done():
            raise EngineError(f"the engine has ended: {attached.loop.failure}") from attached.loop.failure

    client = InferenceClient(attached.address, key=attached.key)
    try:
        await client.start()
        await wait_for_engines(client, count, raise_failure)
    except BaseException:
        attached.task.cancel()
        await coordinator.stop(STOP_SECONDS)
        raise
    finally:
        client.stop()
