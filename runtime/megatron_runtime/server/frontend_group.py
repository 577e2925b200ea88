"""The frontend processes of one endpoint: they share a listening socket, and are started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_runtime.errors import ConfigurationError, CoordinatorError
from megatron_runtime.notifier import Notifier
from megatron_runtime.processes.child import ChildTask
from megatron_runtime.processes.supervisor import HANG_SECONDS, ChildEnd, Supervisor
from megatron_runtime.server.api_keys import ApiKeys
from megatron_runtime.server.options import FrontendOptions
from megatron_runtime.wire.security import key_environment

ABANDON_SECONDS = 3.0
"""How long frontends have, at the end of a drain, to tell their clients that it is over."""


class FrontendGroup:
    """Its processes die with the thread whose event loop it runs on.

    Args:
        sock: A listening socket, made with ``http_server.bind``; it belongs to the group from now on.
        key: The shared secret of the coordinator, if it has one.
        hang_timeout: Seconds of silence after which a frontend counts as hung, and is replaced.
        on_change: Called whenever a frontend came, went, or begins to listen.

    Raises:
        ConfigurationError: The file of API keys can't be read.
    """

    def __init__(
        self,
        options: FrontendOptions,
        sock: socket.socket,
        *,
        key: str | None,
        hang_timeout: float = HANG_SECONDS,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        if options.api_keys_file is not None:
            ApiKeys(Path(options.api_keys_file))
        self.options = options
        self._socket = sock
        self._key = key
        self._on_change = on_change
        self._attached: set[int] = set()
        self._changed = Notifier()
        self._supervisors = [
            Supervisor(
                partial(self._task, index),
                hang_timeout=hang_timeout,
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
        """How many frontends answer."""
        return len(self._attached)

    @property
    def restarts(self) -> int:
        """How often a frontend was started again."""
        return sum(supervisor.restarts for supervisor in self._supervisors)

    def start(self) -> None:
        """Starts the processes; needs a running event loop."""
        self._runs = [asyncio.create_task(supervisor.run()) for supervisor in self._supervisors]
        for run in self._runs:
            run.add_done_callback(lambda _: self._wake())

    async def wait_ready(self, timeout: float) -> None:
        """Returns when all frontends listen.

        Raises:
            ConfigurationError: A frontend found that it can't work with its options.
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
        """How a frontend ended that is not started again, since it can't work with its options."""
        ends = (run.result() for run in self._runs if run.done() and not run.cancelled() and not run.exception())
        return next((end for end in ends if end.is_bad_input), None)

    async def drain(self, timeout: float) -> None:
        """Lets the requests in flight end, at most ``timeout`` seconds; then ends for good.

        New ones are answered with 503, or, where other endpoints take them, find the port closed.
        """
        if self.options.hands_over:
            self._socket.close()
        for supervisor in self._supervisors:
            supervisor.release()
            supervisor.send_signal(signal.SIGTERM)
        _, late = await asyncio.wait(self._runs, timeout=timeout) if self._runs else (set(), set())
        if late:
            for supervisor in self._supervisors:
                supervisor.send_signal(signal.SIGTERM)
            await asyncio.wait(late, timeout=ABANDON_SECONDS)
        await self.stop()

    async def stop(self) -> None:
        """Ends the processes at once and closes the socket; a second call has no effect."""
        for run in self._runs:
            run.cancel()
        for run in self._runs:
            with contextlib.suppress(asyncio.CancelledError):
                await run
        self._attached.clear()
        self._socket.close()

    def _task(self, index: int) -> ChildTask:
        environment = key_environment(self._key)
        if self.options.metrics_folder is not None:
            environment["PROMETHEUS_MULTIPROC_DIR"] = self.options.metrics_folder
        return ChildTask(
            role=f"frontend {index}",
            module="megatron_runtime.server.frontend",
            options={**self.options.serialize(), "listen_fd": self._socket.fileno()},
            environment=environment,
            inherited=(self._socket.fileno(),),
        )

    def _report(self, index: int, report: Any) -> None:
        if report.get("phase") == "Serving":
            self._attached.add(index)
            self._wake()

    def _note(self, index: int) -> None:
        """A frontend came or went: either way it does not listen yet."""
        self._attached.discard(index)
        self._wake()

    def _wake(self) -> None:
        self._changed.notify()
        self._on_change()
