"""The frontend processes of one endpoint: they share a listening socket, and are restarted when they exit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_runtime.errors import ConfigurationError, CoordinatorError
from megatron_runtime.notifier import Notifier
from megatron_runtime.processes.allocator import returns_large_blocks
from megatron_runtime.processes.child import ChildTask
from megatron_runtime.processes.spawning import INTERPRETERS, Spawner
from megatron_runtime.processes.supervisor import HANG_SECONDS, ChildEnd, Supervisor
from megatron_runtime.server.api_keys import TOKEN_DIGEST_VARIABLE, ApiKeys, api_keys_environment, digest
from megatron_runtime.server.options import FrontendOptions
from megatron_runtime.wire.security import key_environment

FRONTEND_MODULE = "megatron_runtime.server.frontend"
START_SECONDS = 30.0
"""To the first heartbeat of a frontend, which imports much and loads a tokenizer; then it is replaced."""
ABORT_SECONDS = 3.0
"""Time for frontends, at the end of a drain, to send errors for the requests that they abort."""


def process_environment(metrics_folder: str | None) -> dict[str, str]:
    """Environment of a frontend that must be set when the process starts and before its imports."""
    folder = {} if metrics_folder is None else {"PROMETHEUS_MULTIPROC_DIR": metrics_folder}
    return returns_large_blocks() | folder


class FrontendGroup:
    """Its processes are killed when the thread of its event loop ends.

    Args:
        sock: A listening socket from ``listening_socket.bind``; the group owns and closes it.
        key: The coordinator's shared secret, if any.
        api_keys: API keys that are valid beside those of the file.
        control_token: Secret for the routes that control the service; None disables them.
        spawner: Starts the processes.
        hang_timeout: Seconds without a heartbeat after which a frontend is considered hung and is replaced.
        blocked_timeout: The same if all its threads are blocked.
        on_change: Called when a frontend starts, exits, begins to listen or to drain.

    Raises:
        ConfigurationError: The file of API keys, or the certificate, can't be read.
    """

    def __init__(
        self,
        options: FrontendOptions,
        sock: socket.socket,
        *,
        key: str | None,
        api_keys: Sequence[str] = (),
        control_token: str | None = None,
        spawner: Spawner = INTERPRETERS,
        hang_timeout: float = HANG_SECONDS,
        blocked_timeout: float = math.inf,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        if options.api_keys_file is not None:
            ApiKeys(Path(options.api_keys_file))
        options.http.certificate()
        self.options = options
        self._socket = sock
        self._spawner = spawner
        self._environment = key_environment(key) | api_keys_environment(api_keys)
        if control_token is not None:
            self._environment[TOKEN_DIGEST_VARIABLE] = digest(control_token).hex()
        self._on_change = on_change
        self._attached: set[int] = set()
        self._draining: set[int] = set()
        self._drained: set[int] = set()
        self._is_released = False
        self._changed = Notifier()
        self._supervisors = [
            Supervisor(
                partial(self._task, index),
                hang_timeout=hang_timeout,
                blocked_timeout=blocked_timeout,
                start_timeout=START_SECONDS,
                on_report=partial(self._report, index),
                on_change=partial(self._note, index),
            )
            for index in range(options.replicas)
        ]
        self._runs: list[asyncio.Task[ChildEnd]] = []

    @property
    def port(self) -> int:
        """The port that the frontends listen on."""
        return int(self._socket.getsockname()[1])

    @property
    def listening(self) -> int:
        """Number of frontends that listen."""
        return len(self._attached)

    @property
    def is_draining(self) -> bool:
        """Whether `drain` was called, and every frontend has begun its drain or has ended."""
        return self._is_released and self._draining.issuperset(self._running)

    @property
    def _running(self) -> list[int]:
        return [index for index, run in enumerate(self._runs) if not run.done()]

    @property
    def restarts(self) -> int:
        """Number of restarts of frontends."""
        return sum(supervisor.restarts for supervisor in self._supervisors)

    def start(self) -> None:
        """Starts the processes; needs a running event loop."""
        self._runs = [asyncio.create_task(supervisor.run()) for supervisor in self._supervisors]
        for run in self._runs:
            run.add_done_callback(lambda _: self._wake())

    async def wait_ready(self, timeout: float) -> None:
        """Returns when all frontends listen.

        Raises:
            ConfigurationError: The options of a frontend are invalid.
            CoordinatorError: They did not listen within ``timeout`` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while self.listening < self.options.replicas:
                    if (failure := self.failure) is not None:
                        raise ConfigurationError(failure.message)
                    await self._changed.wait()
        except TimeoutError:
            message = f"{self.listening} of {self.options.replicas} frontends listen after {timeout:.0f} s"
            raise CoordinatorError(message) from None

    @property
    def failure(self) -> ChildEnd | None:
        """The exit of a frontend that is not restarted because its options are invalid."""
        ends = (run.result() for run in self._runs if run.done() and not run.cancelled() and not run.exception())
        return next((end for end in ends if end.is_bad_input), None)

    async def drain(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for the requests in flight, then stops for good.

        New requests get 503 once ``is_draining``, or with ``hands_over`` a closed port, so that they go to another
        endpoint.
        """
        self._is_released = True
        if self.options.hands_over:
            self._socket.close()
        for supervisor in self._supervisors:
            supervisor.release()
            supervisor.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self._drained.issuperset(self._running):
                    await self._changed.wait()
        for supervisor in self._supervisors:
            supervisor.send_signal(signal.SIGTERM)
        if self._running:
            await asyncio.wait(self._runs, timeout=ABORT_SECONDS)
        await self.stop()

    async def stop(self) -> None:
        """Kills the processes and closes the socket; a second call has no effect."""
        for run in self._runs:
            run.cancel()
        for run in self._runs:
            with contextlib.suppress(asyncio.CancelledError):
                await run
        self._attached.clear()
        self._socket.close()

    def _task(self, index: int) -> ChildTask:
        return ChildTask(
            role=f"frontend {index}",
            module=FRONTEND_MODULE,
            options=self.options.serialize(),
            environment=process_environment(self.options.metrics_folder) | self._environment,
            descriptors={"listen_fd": self._socket.fileno()},
            spawner=self._spawner,
        )

    def _report(self, index: int, report: Any) -> None:
        if report.get("phase") == "Serving":
            self._attached.add(index)
            self._wake()
        elif report.get("phase") == "Draining":
            self._draining.add(index)
            self._wake()
        elif report.get("phase") == "Drained":
            self._drained.add(index)
            if not self._is_released:  # the signal was for this frontend alone, which is replaced
                self._supervisors[index].send_signal(signal.SIGTERM)
            self._wake()

    def _note(self, index: int) -> None:
        """A frontend has started or exited; in both cases it does not listen."""
        self._attached.discard(index)
        self._draining.discard(index)
        self._drained.discard(index)
        self._wake()

    def _wake(self) -> None:
        self._changed.notify()
        self._on_change()
