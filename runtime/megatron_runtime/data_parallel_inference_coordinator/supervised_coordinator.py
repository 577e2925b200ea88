"""A coordinator in a child process that is restarted when it fails."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_runtime.data_parallel_inference_coordinator.options import (
    CoordinatorOptions,
    CoordinatorProcessOptions,
    ServiceWeights,
)
from megatron_runtime.errors import ConfigurationError, CoordinatorError
from megatron_runtime.lifecycle import CoordinatorState
from megatron_runtime.processes.allocator import returns_large_blocks
from megatron_runtime.processes.child import ChildTask, Report
from megatron_runtime.processes.supervisor import HANG_SECONDS, ChildEnd, RestartBudget, Supervisor
from megatron_runtime.wire.security import key_environment

_MODULE = "megatron_runtime.data_parallel_inference_coordinator.coordinator_process"


class SupervisedCoordinator:
    """A restarted process listens on the same port, and starts with the current state and weights of the service.

    The process ends with the thread whose event loop runs this object.

    Args:
        options: Options of the first process.
        key: The shared secret of all peers; None means plain sockets.
        current_state: Returns the state of the service, or the target of its transition.
        may_use_other_port: Whether the first process may listen on another port when the given one is in use.
        publishes_key: Whether clients of the same user find the key in a file.
        budget: Limit of the restarts; None for no limit.
        restart_success: Restart the process also after a normal end, such as a client's SHUTDOWN.
        hang_timeout: Seconds without a heartbeat after which a process counts as hung and is replaced.
        blocked_timeout: The same if all its threads are blocked.
        ends_when_parent_hangs: The process ends when this one hangs, so that another coordinator can take its place.
        log_level: Log level of the process.
        on_end: Called with the end of the process once it is not restarted.
        on_change: Called whenever a process starts or ends.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        key: str | None,
        current_state: Callable[[], CoordinatorState],
        may_use_other_port: bool = False,
        publishes_key: bool = False,
        budget: RestartBudget | None = None,
        restart_success: bool = True,
        hang_timeout: float = HANG_SECONDS,
        blocked_timeout: float = math.inf,
        ends_when_parent_hangs: bool = False,
        log_level: str = "INFO",
        on_end: Callable[[ChildEnd], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._may_use_other_port = may_use_other_port
        self._key = key
        self._publishes_key = publishes_key
        self._current_state = current_state
        self._ends_when_parent_hangs = ends_when_parent_hangs
        self._log_level = log_level
        self._on_end = on_end
        self._supervisor = Supervisor(
            self._task,
            budget,
            restart_success=restart_success,
            hang_timeout=hang_timeout,
            blocked_timeout=blocked_timeout,
            on_report=self._handle_report,
            on_change=on_change,
        )
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._run: asyncio.Task[ChildEnd] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the latest process."""
        return None if self._supervisor.child is None else self._supervisor.child.pid

    @property
    def is_alive(self) -> bool:
        """Whether a process is running."""
        return self._supervisor.child is not None and self._supervisor.child.is_alive

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        return self._supervisor.restarts

    def start(self) -> None:
        """Start the process, and restart it when it fails."""
        self._run = asyncio.create_task(self._supervise())

    async def wait_serving(self, timeout: float) -> str:
        """Wait until the first process listens, and return its address.

        Raises:
            ConfigurationError: It can't work with its options.
            CoordinatorError: It ended for another reason, or did not listen within ``timeout`` seconds.
        """
        assert self._run is not None, "wait_serving() needs start()"
        awaited: set[asyncio.Future[Any]] = {self._run, self._address}
        await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._address.done():
            return self._address.result()
        if not self._run.done():
            raise CoordinatorError(f"the coordinator did not listen within {timeout:.0f} s")
        end = self._run.result()
        raise (ConfigurationError if end.is_bad_input else CoordinatorError)(end.message)

    async def stop(self, grace_seconds: float) -> None:
        """End the process without a restart; after the grace period it is killed."""
        await self._supervisor.stop(grace_seconds)
        await self.close()

    async def close(self) -> None:
        """End the process at once. Idempotent."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _supervise(self) -> ChildEnd:
        end = await self._supervisor.run()
        self._on_end(end)
        return end

    def _task(self) -> ChildTask:
        options = CoordinatorProcessOptions(
            replace(self._options, initial_state=self._current_state()),
            may_use_other_port=self._may_use_other_port,
            publishes_key=self._publishes_key,
        )
        return ChildTask(
            role="coordinator",
            module=_MODULE,
            options=options.serialize(),
            environment=key_environment(self._key) | returns_large_blocks(),
            log_level=self._log_level,
            gets_beats=self._ends_when_parent_hangs,
        )

    def _handle_report(self, report: Report) -> None:
        if "weights" in report:
            weights = report["weights"]
            self._options = replace(
                self._options, initial_weights=None if weights is None else ServiceWeights(*weights)
            )
        if "address" in report and not self._address.done():
            address = str(report["address"])
            self._options = replace(self._options, inference_coordinator_port=int(address.rpartition(":")[2]))
            self._may_use_other_port = False
            self._address.set_result(address)
