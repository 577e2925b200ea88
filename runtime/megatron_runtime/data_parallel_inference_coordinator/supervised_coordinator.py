"""A coordinator in a process of its own that is started again when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from megatron_runtime.errors import ConfigurationError, CoordinatorError
from megatron_runtime.processes.child import ChildTask, Report
from megatron_runtime.processes.supervisor import HANG_SECONDS, ChildEnd, RestartBudget, Supervisor
from megatron_runtime.wire.security import key_environment

_MODULE = "megatron_runtime.data_parallel_inference_coordinator.coordinator_process"


class SupervisedCoordinator:
    """Every process after the first takes over at the same port, in the state that the service is in by then, and with
    the weights that the last one had.

    They die with the thread whose event loop this lives on.

    Args:
        options: Arguments of DataParallelInferenceCoordinator by name, as JSON values.
        key: The shared secret of all peers; None means plain sockets.
        current_state: The name of the state that the service is in, or on its way to.
        may_move: Whether the first process may take another port than the wanted one.
        budget: How often it may be started again; None for no end of that.
        restart_success: Start it again also when it ended well, as it does when a client sends SHUTDOWN.
        hang_timeout: Seconds of silence after which a process counts as hung, and is replaced.
        ends_alone: Whether a process ends when this one stands still, so that another one elsewhere can take its place.
        log_level: Of what its processes write.
        on_end: Called with how it ended, once it is not started again.
        on_change: Called whenever a process came or went.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        key: str | None,
        current_state: Callable[[], str],
        may_move: bool = False,
        budget: RestartBudget | None = None,
        restart_success: bool = True,
        hang_timeout: float = HANG_SECONDS,
        ends_alone: bool = False,
        log_level: str = "INFO",
        on_end: Callable[[ChildEnd], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = {**options, "may_move": may_move}
        self._key = key
        self._current_state = current_state
        self._ends_alone = ends_alone
        self._log_level = log_level
        self._on_end = on_end
        self._supervisor = Supervisor(
            self._task,
            budget,
            restart_success=restart_success,
            hang_timeout=hang_timeout,
            on_report=self._take,
            on_change=on_change,
        )
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._run: asyncio.Task[ChildEnd] | None = None

    @property
    def pid(self) -> int | None:
        """The process as it is now."""
        return None if self._supervisor.child is None else self._supervisor.child.pid

    @property
    def is_alive(self) -> bool:
        """Whether there is a process right now."""
        return self._supervisor.child is not None and self._supervisor.child.is_alive

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self._supervisor.restarts

    def start(self) -> None:
        """Start it, and keep it running."""
        self._run = asyncio.create_task(self._keep())

    async def wait_serving(self, timeout: float) -> str:
        """Wait for the first process to listen, and return its address.

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
        """End it for good; a process that takes longer than the grace is killed."""
        await self._supervisor.stop(grace_seconds)
        await self.close()

    async def close(self) -> None:
        """End it at once; repeating it is fine."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _keep(self) -> ChildEnd:
        end = await self._supervisor.run()
        self._on_end(end)
        return end

    def _task(self) -> ChildTask:
        return ChildTask(
            role="coordinator",
            module=_MODULE,
            options={**self._options, "initial_state": self._current_state()},
            environment=key_environment(self._key),
            log_level=self._log_level,
            gets_beats=self._ends_alone,
        )

    def _take(self, report: Report) -> None:
        if "weights" in report:
            self._options["initial_weights"] = report["weights"]
        if "address" in report and not self._address.done():
            address = str(report["address"])
            self._options |= {"inference_coordinator_port": int(address.rpartition(":")[2]), "may_move": False}
            self._address.set_result(address)
