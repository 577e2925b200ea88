"""Suspends engines that nobody asks anything, and wakes them for the next request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from megatron_runtime.data_parallel_inference_coordinator.states import CoordinatorState, next_signal
from megatron_runtime.errors import MegatronInferenceError
from megatron_runtime.headers import EngineState
from megatron_runtime.wire.service_state import ServiceState

logger = logging.getLogger(__name__)


class AutoSuspend:
    """Goes the way to sleep and back edge by edge, as it is told where the service stands.

    Whoever sends a signal of their own takes over: the engines stay where that leads them, until they are idle again
    while they run.

    Args:
        idle_after: Seconds without a request after which running engines are suspended.
        send: Sends a signal to the engines and returns when they have obeyed.
        clock: Monotonic seconds.
    """

    def __init__(
        self, idle_after: float, send: Callable[[str], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._idle_after = idle_after
        self._send = send
        self._clock = clock
        self._busy_at = clock()
        self._accepted = 0
        self._service: ServiceState | None = None
        self._sending: asyncio.Task[None] | None = None
        self.is_asleep = False
        """Whether the engines are suspended for want of requests, or on their way there or back."""

    def note(self, service: ServiceState) -> None:
        """Take in where the service stands, and take the next step if there is one."""
        self._service = service
        now = self._clock()
        is_running = EngineState(service.state) is EngineState.RUNNING
        is_wanted = service.outstanding_requests or service.accepted_requests != self._accepted
        if is_wanted or not service.engines or not (is_running or self.is_asleep):
            self._busy_at = now
        self._accepted = service.accepted_requests
        if is_running:
            self._fall_asleep_or_wake(now)
        self._advance()

    def take_over(self) -> bool:
        """Somebody else decides now where the engines are; whether they were asleep."""
        was_asleep, self.is_asleep = self.is_asleep, False
        return was_asleep

    def stop(self) -> None:
        """Send nothing more."""
        if self._sending is not None:
            self._sending.cancel()

    def _fall_asleep_or_wake(self, now: float) -> None:
        is_idle = now - self._busy_at >= self._idle_after
        if is_idle and not self.is_asleep:
            logger.info("no request for %g s: the engines are suspended until the next one", self._idle_after)
        elif self.is_asleep and not is_idle:
            logger.info("a request has woken the engines")
        self.is_asleep = is_idle

    def _advance(self) -> None:
        """Take the step that leads on from where the service stands, unless one is in flight."""
        if self._service is None or not self.is_asleep or self._sending is not None:
            return
        is_wanted = self._service.outstanding_requests > 0
        wish = CoordinatorState.RUNNING if is_wanted else CoordinatorState.SUSPENDED
        signal = next_signal(EngineState(self._service.state), wish)
        if signal is not None:
            self._sending = asyncio.create_task(self._step(signal.name.lower()))

    async def _step(self, signal: str) -> None:
        """One signal; when it is obeyed, the service has been looked at again."""
        try:
            await self._send(signal)
        except MegatronInferenceError as error:
            logger.warning("%s: %s", signal, error)
            self._sending = None  # the next look tries again
        else:
            self._sending = None
            self._advance()
