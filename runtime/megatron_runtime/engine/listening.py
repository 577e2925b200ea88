"""Puts an engine to work for a coordinator, and starts the coordinator if this is the rank to do so."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed

from megatron_runtime.config import DEFAULT_MAX_REQUESTS, InferenceConfig
from megatron_runtime.data_parallel_inference_coordinator.kept_coordinator import KeptCoordinator
from megatron_runtime.data_parallel_inference_coordinator.states import SETTLED, CoordinatorState
from megatron_runtime.engine.coordinated_loop import CoordinatedLoop, Engine
from megatron_runtime.engine.running_engine import RunningEngine
from megatron_runtime.launch.keeper import ChildEnd, RestartBudget
from megatron_runtime.launch.parent_link import EXIT_DRAINED
from megatron_runtime.wire.security import KEY_VARIABLE

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
STOP_SECONDS = 5.0
MOST_RESTARTS = 10


@dataclass(frozen=True)
class World:
    """This process among those that torch.distributed started together; alone if it did not."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> World:
        """As torch.distributed says."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return cls(0, 1)

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank; all ranks call it."""
        if self.size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]


@dataclass(eq=False)
class Listening:
    """An engine at work."""

    address: str
    """Where the coordinator is."""
    key: str | None
    """What to show it."""
    loop: CoordinatedLoop
    task: asyncio.Task[None]
    """Runs the loop."""
    coordinator: KeptCoordinator | None
    """On the rank that started it."""


async def listen(
    engine: Engine,
    *,
    port: int | None = None,
    launch_coordinator: bool = True,
    hostname: str | None = None,
    key: str | None = None,
    schedule_output_path: str | None = None,
    prepare_thread: Callable[[], None] | None = None,
) -> Listening:
    """Put an engine to work, as a task of the running loop. With several ranks, every rank calls it.

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
    """
    world = World.current()
    host = hostname or (os.environ.get("MASTER_ADDR", "127.0.0.1") if world.size > 1 else "127.0.0.1")
    key = key if key is not None else os.environ.get(KEY_VARIABLE)
    coordinator: KeptCoordinator | None = None
    address = f"{host}:{port}"
    loops: list[CoordinatedLoop] = []
    if launch_coordinator and world.rank == 0:
        options = _coordinator_options(engine, world, host, port, schedule_output_path)
        coordinator, address = await _launch_coordinator(options, key, lambda: _service_state(loops))
    if launch_coordinator:
        address = await asyncio.to_thread(world.share, address)
    loop = CoordinatedLoop(
        engine,
        coordinator_address=address,
        data_parallel_rank=world.rank,
        key=key,
        prepare_thread=prepare_thread,
    )
    loops.append(loop)
    if isinstance(engine, RunningEngine):
        engine.coordinated_loop = loop
    return Listening(address, key, loop, asyncio.create_task(loop.run()), coordinator)


def _service_state(loops: list[CoordinatedLoop]) -> str:
    """Where this rank's loop says that the service is; one that has stopped, or has not begun, knows nothing else."""
    settled = SETTLED.get(loops[0].state) if loops else None
    return "RUNNING" if settled in (None, CoordinatorState.STOPPING) else settled.name


async def _launch_coordinator(
    options: dict[str, Any], key: str | None, current_state: Callable[[], str]
) -> tuple[KeptCoordinator, str]:
    """The coordinator, which listens, and its address. It has to start at once; later it may be started again."""
    budget = RestartBudget(0)
    coordinator = KeptCoordinator(
        options,
        key=key,
        current_state=current_state,
        may_move=True,
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
    if end.exit_code != EXIT_DRAINED:
        logger.error("the coordinator is not started again: %s", end.message)


def _coordinator_options(
    engine: Engine, world: World, host: str, port: int | None, schedule_output_path: str | None
) -> dict[str, Any]:
    config = getattr(engine, "config", None) or InferenceConfig()
    options: dict[str, Any] = {
        "data_parallel_size": world.size,
        "inference_coordinator_port": port,
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        "block_size_tokens": config.block_size_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "prefix_caching_coordinator_policy": config.prefix_caching_coordinator_policy.value,
        "prefix_caching_routing_alpha": config.prefix_caching_routing_alpha,
        "max_requests": config.max_requests or DEFAULT_MAX_REQUESTS,
        "schedule_output_path": schedule_output_path,
        "host": host,
    }
    if config.request_timeout is not None:
        options["request_timeout"] = config.request_timeout
    return options


_listening: set[asyncio.Task[None]] = set()


async def start_listening(engine: Engine, **options: Any) -> str:
    """As `listen`, for callers that stop engine and coordinator through a client.

    Returns:
        The coordinator's address.
    """
    listening = await listen(engine, **options)

    async def end() -> None:
        await asyncio.gather(listening.task, return_exceptions=True)
        if listening.coordinator is not None and listening.loop.failure is not None:
            await listening.coordinator.stop(STOP_SECONDS)

    # The loop holds tasks by weak references only.
    task = asyncio.create_task(end())
    _listening.add(task)
    task.add_done_callback(_listening.discard)
    return listening.address
