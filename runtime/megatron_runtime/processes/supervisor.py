"""Keeps what a pod needs running: starts it again with growing delays until it is told to stop or gives up."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from megatron_runtime.processes.child import Child, ChildTask, Report
from megatron_runtime.processes.parent_link import BEAT_SECONDS, EXIT_BAD_INPUT, EXIT_DRAINED, EXIT_FAILURE

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.2
LONGEST_DELAY = 10.0
STEADY_SECONDS = 30.0
"""A child that lived this long starts over with the shortest delay."""
HANG_SECONDS = 30.0
"""A child that was heard and then is silent for so long is taken for hung."""
RESET_SECONDS = 3600.0
"""After so long without a restart the whole budget is there again."""


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended. ``error`` is what it reported itself, if it could."""

    role: str
    exit_code: int
    tail: tuple[str, ...] = ()
    error: Report | None = None

    @property
    def is_bad_input(self) -> bool:
        """Whether another try with the same input is in vain."""
        return self.exit_code == EXIT_BAD_INPUT

    @property
    def message(self) -> str:
        """One or a few lines that say what happened."""
        if self.error is not None and self.error.get("message"):
            return str(self.error["message"])
        how = _how_it_ended(self.exit_code)
        last = "\n".join(self.tail[-8:])
        return f"{self.role} {how}" + (f"; its last words:\n{last}" if last else "")


class RestartBudget:
    """How many restarts are left; several supervisors may share one.

    A pod that crashes once a day must not end after some days: the budget is whole again once ``reset_after`` seconds
    have gone by since the last restart, or since the start.

    Args:
        limit: Restarts in a row; None means no end of them.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        reset_after: float = RESET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.used = 0
        self._reset_after = reset_after
        self._clock = clock
        self._last = clock()

    def can_restart(self) -> bool:
        """Whether one more is allowed."""
        if self._clock() - self._last >= self._reset_after:
            self.used = 0
        return self.limit is None or self.used < self.limit

    def take(self) -> None:
        """Counts one restart."""
        self.used += 1
        self._last = self._clock()


class Restarter(ABC):
    """One place in the pod that has to be filled: lives again and again, until it is told to stop or gives up.

    Without ``restart_success`` exit code 0 is final. ``on_change`` is called whenever a life began, ended or is to
    begin again.
    """

    def __init__(
        self, budget: RestartBudget | None = None, *, restart_success: bool, on_change: Callable[[], None]
    ) -> None:
        self._budget = budget or RestartBudget()
        self._restart_success = restart_success
        self._on_change = on_change
        self._stopping = asyncio.Event()
        self.restarts = 0

    @abstractmethod
    async def _live_once(self) -> ChildEnd:
        """From a start to its end. Cancelled, it leaves no process."""

    async def run(self) -> ChildEnd:
        """Returns how the last life ended, once there is to be no other. Cancelled, it ends the present one."""
        delay = FIRST_DELAY
        while True:
            started = time.monotonic()
            end = await self._live_once()
            self._on_change()
            if self._stopping.is_set() or not self._is_worth_another(end):
                return end
            if time.monotonic() - started > STEADY_SECONDS:
                delay = FIRST_DELAY
            self._budget.take()
            self.restarts += 1
            logger.warning("%s %s; restarting it in %.1f s", end.role, _how_it_ended(end.exit_code), delay)
            self._on_change()
            if await self._stopped_within(delay):
                return end
            delay = min(2 * delay, LONGEST_DELAY)

    def release(self) -> None:
        """From now on nothing is started again; what lives is left to end by itself."""
        self._stopping.set()

    def _is_worth_another(self, end: ChildEnd) -> bool:
        if end.is_bad_input or (end.exit_code == EXIT_DRAINED and not self._restart_success):
            return False
        return self._budget.can_restart()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


class Supervisor(Restarter):
    """A place that one child fills.

    ``make_task`` is asked anew for every start, so that a restarted child gets what holds by then.

    A child that beats (see ``ParentLink.keep_beating``) and then is silent for ``hang_timeout`` seconds hangs, or was
    stopped by a signal: it is killed, and started again like one that died.
    """

    def __init__(
        self,
        make_task: Callable[[], ChildTask],
        budget: RestartBudget | None = None,
        *,
        restart_success: bool = True,
        hang_timeout: float = HANG_SECONDS,
        on_report: Callable[[Report], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
        log: TextIO | None = None,
    ) -> None:
        super().__init__(budget, restart_success=restart_success, on_change=on_change)
        self._make_task = make_task
        self._hang_timeout = hang_timeout
        self._on_report = on_report
        self._log = log
        self.child: Child | None = None

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the child as it is now, if there is one."""
        if self.child is not None:
            self.child.send_signal(number)

    async def stop(self, grace_seconds: float) -> None:
        """Ends the child for good."""
        self.release()
        if self.child is not None and self.child.is_alive:
            await self.child.stop(grace_seconds)

    async def _live_once(self) -> ChildEnd:
        return await ChildLife(self._make_task(), self._on_report, self._log, self._hang_timeout).run(self._started)

    def _started(self, child: Child) -> None:
        self.child = child
        self._on_change()
        if self._stopping.is_set():
            child.send_signal(signal.SIGTERM)


class ChildLife:
    """One child from its start to its end, which comes early if it hangs."""

    def __init__(
        self, task: ChildTask, on_report: Callable[[Report], None], log: TextIO | None, hang_timeout: float
    ) -> None:
        self._task = task
        self._on_report = on_report
        self._hang_timeout = hang_timeout
        self._error: Report | None = None
        self._silence: float | None = None
        self.child = Child(task, self._receive, log)

    async def run(self, on_start: Callable[[Child], None]) -> ChildEnd:
        """Calls ``on_start`` once the process is there, and waits for its end. Cancelled, it kills the child."""
        try:
            await self.child.start()
        except OSError as error:
            return ChildEnd(self._task.role, EXIT_FAILURE, (f"could not be started: {error}",))
        on_start(self.child)
        watch = asyncio.create_task(self._kill_when_hung())
        try:
            code = await self.child.wait()
        except asyncio.CancelledError:
            await self.child.kill()
            raise
        finally:
            watch.cancel()
        return ChildEnd(self._task.role, code, tuple(self.child.tail), self._error)

    async def _kill_when_hung(self) -> None:
        """Counts its own turns and asks no clock: a launcher that was stopped itself must not blame its children."""
        while self._silence is None or self._silence < self._hang_timeout:
            await asyncio.sleep(BEAT_SECONDS)
            if self._silence is not None:
                self._silence += BEAT_SECONDS
        message = f"{self._task.role} gave no sign of life for {self._hang_timeout:g} s and was killed"
        logger.error(message)
        self._error = {"reason": "Hung", "message": message}
        self.child.send_signal(signal.SIGKILL)

    def _receive(self, report: Report) -> None:
        if "beat" in report:
            self._silence = 0.0
            return
        if isinstance(error := report.get("error"), dict):
            self._error = error
        self._on_report(report)


def error_report(error: BaseException, reason: str | None = None) -> dict[str, Any]:
    """An exception as the ``error`` field of a report; with the ``field`` that is wrong, where it names one."""
    field = getattr(error, "field", None)
    return {"reason": reason or type(error).__name__, "message": str(error)} | ({"field": field} if field else {})


def _how_it_ended(code: int) -> str:
    if code == EXIT_DRAINED:
        return "ended"
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
