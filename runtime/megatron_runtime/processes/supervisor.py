"""Keeps a child process running: restarts it with growing delays until it is stopped or its budget is exhausted."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from megatron_runtime.processes.child import Child, ChildTask, Report
from megatron_runtime.processes.hang_detection import UNLIMITED, Silence, SilenceLimits, is_blocked
from megatron_runtime.processes.parent_link import BEAT_SECONDS, EXIT_BAD_INPUT, EXIT_DRAINED, EXIT_FAILURE

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.2
LONGEST_DELAY = 10.0
STEADY_SECONDS = 5.0
"""A child that ran for so long after its first heartbeat restarts with the shortest delay: longer delays are for
children that fail at their start, since requests wait meanwhile."""
HANG_SECONDS = 30.0
"""A child whose heartbeats stop for this long counts as hung."""
START_SECONDS = 10.0
"""A child of a `Supervisor` that sends no heartbeat for this long after its start counts as hung too."""
FIRST_START_FACTOR = 3
"""The first start has more time, because it may read the code from a slow disk."""
RESET_SECONDS = 3600.0
"""Seconds without a restart after which the full budget is available again."""
_HUNG = "Hung"


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended. ``error`` is the error that it reported, if it did."""

    role: str
    exit_code: int
    tail: tuple[str, ...] = ()
    error: Report | None = None
    seconds_served: float = 0.0
    """The time from its first heartbeat."""

    @property
    def is_bad_input(self) -> bool:
        """Whether a restart with the same input would fail again."""
        return self.exit_code == EXIT_BAD_INPUT

    @property
    def is_consequence(self) -> bool:
        """Whether it ended because another rank was lost or late."""
        return self.error is not None and is_lost_rank(self.error)

    @property
    def message(self) -> str:
        """The error, or exit code and last output."""
        if self.error is not None and self.error.get("message"):
            return str(self.error["message"])
        how = _how_it_ended(self.exit_code)
        last = "\n".join(self.tail[-8:])
        return f"{self.role} {how}" + (f"; its last output:\n{last}" if last else "")


def is_lost_rank(error: Report) -> bool:
    """Whether a process reports that another rank was lost or late."""
    return error.get("reason") == "LostRankError"


class RestartBudget:
    """The remaining restarts. Several supervisors may share a budget.

    So that a pod that crashes once a day does not end after some days, the full budget is available again
    ``reset_after`` seconds after the last restart or the start.

    Args:
        limit: Restarts in a row; None for no limit.
        clock: A monotonic clock, in seconds.
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
        """Whether another restart is allowed."""
        if self._clock() - self._last >= self._reset_after:
            self.used = 0
        return self.limit is None or self.used < self.limit

    def take(self) -> None:
        """Count a restart."""
        self.used += 1
        self._last = self._clock()


class Restarter(ABC):
    """Runs a process, or a group of processes, again and again until it is stopped or the budget is exhausted.

    Without ``restart_success`` exit code 0 is final. ``on_change`` is called after each start, each end, and before
    each restart.
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
        """Run once, from start to end. When cancelled, it leaves no process."""

    async def run(self) -> ChildEnd:
        """Run until the last end, and return it. When cancelled, it ends the running process."""
        delay = FIRST_DELAY
        while True:
            end = await self._live_once()
            self._on_change()
            if self._stopping.is_set() or not self._is_worth_another(end):
                return end
            if end.seconds_served > STEADY_SECONDS:
                delay = FIRST_DELAY
            self._budget.take()
            self.restarts += 1
            logger.warning("%s %s; restarting it in %.1f s", end.role, _how_it_ended(end.exit_code), delay)
            self._on_change()
            if await self._stopped_within(delay):
                return end
            delay = min(2 * delay, LONGEST_DELAY)

    def release(self) -> None:
        """Disable further restarts. The running process continues."""
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
    """Keeps one child running.

    ``make_task`` is called before every start, so that a restarted child gets current options.

    A child that sends no heartbeats (see ``ParentLink.keep_beating``) for ``hang_timeout`` seconds, or none within
    ``start_timeout`` seconds of its start, hangs or was stopped by a signal: it is killed and restarted like one that
    failed; after ``blocked_timeout`` seconds already if all its threads are blocked. On a busy machine a start may take
    longer, so each that was too late doubles the time of the next one.
    """

    def __init__(
        self,
        make_task: Callable[[], ChildTask],
        budget: RestartBudget | None = None,
        *,
        restart_success: bool = True,
        hang_timeout: float = HANG_SECONDS,
        start_timeout: float = START_SECONDS,
        blocked_timeout: float = math.inf,
        on_report: Callable[[Report], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
        log: TextIO | None = None,
    ) -> None:
        super().__init__(budget, restart_success=restart_success, on_change=on_change)
        self._make_task = make_task
        self._running = SilenceLimits(hang_timeout, blocked_timeout)
        self._starting = SilenceLimits(start_timeout, blocked_timeout)
        self._start_factor = FIRST_START_FACTOR
        self._on_report = on_report
        self._log = log
        self.child: Child | None = None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the current child, if there is one."""
        if self.child is not None:
            self.child.send_signal(number)

    async def stop(self, grace_seconds: float) -> None:
        """Stop the child permanently."""
        self.release()
        if self.child is not None and self.child.is_alive:
            await self.child.stop(grace_seconds)

    async def _live_once(self) -> ChildEnd:
        limits = self._running, self._starting * self._start_factor
        life = ChildLife(self._make_task(), self._on_report, self._log, *limits)
        end = await life.run(self._started)
        if life.has_begun:
            self._start_factor = 1
        elif life.was_hung:
            self._start_factor *= 2
        return end

    def _started(self, child: Child) -> None:
        self.child = child
        self._on_change()
        if self._stopping.is_set():
            child.send_signal(signal.SIGTERM)


class ChildLife:
    """One run of a child, which is killed if it hangs.

    Args:
        task: Of the child.
        on_report: Called with each of its reports.
        log: Where its output goes.
        running: Limits after the first heartbeat.
        starting: Limits before.
    """

    def __init__(
        self,
        task: ChildTask,
        on_report: Callable[[Report], None],
        log: TextIO | None,
        running: SilenceLimits,
        starting: SilenceLimits = UNLIMITED,
    ) -> None:
        self._task = task
        self._on_report = on_report
        self._running = running
        self._starting = starting
        self._error: Report | None = None
        self._silence = Silence()
        self._first_beat: float | None = None
        self.child = Child(task, self._receive, log)

    @property
    def has_begun(self) -> bool:
        """Whether the child has sent a heartbeat."""
        return self._first_beat is not None

    @property
    def _limits(self) -> SilenceLimits:
        return self._running if self.has_begun else self._starting

    @property
    def was_hung(self) -> bool:
        """Whether the child was killed because it hung."""
        return self._error is not None and self._error.get("reason") == _HUNG

    @property
    def is_failing(self) -> bool:
        """Whether the process has reported an error of its own, and so is about to end."""
        return self._error is not None and not is_lost_rank(self._error)

    async def run(self, on_start: Callable[[Child], None]) -> ChildEnd:
        """Start the process, call ``on_start``, and wait for the end. When cancelled, it kills the child."""
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
        served = 0.0 if self._first_beat is None else time.monotonic() - self._first_beat
        return ChildEnd(self._task.role, code, tuple(self.child.tail), self._error, served)

    async def _kill_when_hung(self) -> None:
        pid = self.child.pid
        assert pid is not None
        while (hang := self._silence.beyond(self._limits)) is None:
            await asyncio.sleep(BEAT_SECONDS)
            # A rank on a GPU may have hundreds of threads, whose states matter to no limit of it.
            self._silence.add(BEAT_SECONDS, blocked=self._limits.blocked < math.inf and is_blocked(pid))
        when = "" if self.has_begun else " after its start"
        seconds, reason = hang
        message = f"{self._task.role} sent no heartbeat for {seconds:g} s{when} and was killed{reason}"
        logger.error(message)
        self._error = {"reason": _HUNG, "message": message}
        self.child.send_signal(signal.SIGKILL)

    def _receive(self, report: Report) -> None:
        if "beat" in report:
            if self._first_beat is None:
                self._first_beat = time.monotonic()
            self._silence.end()
            return
        if isinstance(error := report.get("error"), dict):
            self._error = error
        self._on_report(report)


def error_report(error: BaseException, reason: str | None = None) -> dict[str, Any]:
    """An exception as the ``error`` of a report, with the invalid ``field`` if the exception names one."""
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
