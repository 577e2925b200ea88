"""Suspends engines that get no requests, and resumes them for the next one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from megatron_runtime.errors import MegatronInferenceError
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.lifecycle import CoordinatorState, next_signal
from megatron_runtime.wire.service_state import ServiceState

logger = logging.getLogger(__name__)


class AutoSuspend:
    """Moves idle engines to SUSPENDED and back to RUNNING, one signal at a time, as it observes the service.

    A signal of a client overrides it: the engines stay in the state that the client chose, until they run and are idle
    again.

    Args:
        idle_after: Seconds without a request after which running engines are suspended.
        send: Sends a signal to the engines and returns when they have carried it out.
        clock: Monotonic seconds.
    """

    def __init__(
        self, idle_after: float, send: Callable[[Headers], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._idle_after = idle_after
        self._send = send
        self._clock = clock
        self._busy_at = clock()
        self._accepted = 0
        self._service: ServiceState | None = None
        self._sending: asyncio.Task[None] | None = None
        self.is_suspended = False
        """Whether the engines are suspended because they were idle, or move to that state or back."""

    def observe(self, service: ServiceState) -> None:
        """Note the state of the service, and send the next signal if one is due."""
        self._service = service
        now = self._clock()
        is_running = EngineState(service.state) is EngineState.RUNNING
        has_requests = service.outstanding_requests or service.accepted_requests != self._accepted
        if has_requests or not service.engines or not (is_running or self.is_suspended):
            self._busy_at = now
        self._accepted = service.accepted_requests
        if is_running:
            self._decide(now)
        self._advance()

    def override(self) -> bool:
        """A client controls the engines from now on; returns whether they were suspended because they were idle."""
        was_suspended, self.is_suspended = self.is_suspended, False
        return was_suspended

    def stop(self) -> None:
        """Send no more signals."""
        if self._sending is not None:
            self._sending.cancel()

    def _decide(self, now: float) -> None:
        """Whether running engines are to be suspended."""
        is_idle = now - self._busy_at >= self._idle_after
        if is_idle and not self.is_suspended:
            logger.info("no request for %g s: suspending the engines until the next request", self._idle_after)
        elif self.is_suspended and not is_idle:
            logger.info("a request arrived: the engines run again")
        self.is_suspended = is_idle

    def _advance(self) -> None:
        """Send the next signal towards the target, unless one is in progress."""
        if self._service is None or not self.is_suspended or self._sending is not None:
            return
        has_requests = self._service.outstanding_requests > 0
        target = CoordinatorState.RUNNING if has_requests else CoordinatorState.SUSPENDED
        signal = next_signal(EngineState(self._service.state), target)
        if signal is not None:
            self._sending = asyncio.create_task(self._step(signal))

    async def _step(self, signal: Headers) -> None:
        """Send one signal. By the time it returns, `observe` has been called with the new state."""
        try:
            await self._send(signal)
        except MegatronInferenceError as error:
            logger.warning("%s: %s", signal.name.lower(), error)
            self._sending = None  # The next observation repeats the step.
        else:
            self._sending = None
            self._advance()
