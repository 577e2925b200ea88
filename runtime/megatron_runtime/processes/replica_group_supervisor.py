"""Keeps the ranks of one replica group running: they start and end together."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from functools import partial
from typing import TextIO

from megatron_runtime.processes.child import Child, ChildTask, Report
from megatron_runtime.processes.hang_detection import SilenceLimits
from megatron_runtime.processes.parent_link import EXIT_DRAINED
from megatron_runtime.processes.supervisor import HANG_SECONDS, ChildEnd, ChildLife, RestartBudget, Restarter

FAREWELL_SECONDS = 10.0
"""Seconds that the other ranks may run after a rank exited with 0, or that one may need to end after its error."""


class ReplicaGroupSupervisor(Restarter):
    """Supervises the ranks of a replica group. When one ends, the others are stopped, and all start again together.

    Ranks that were not stopped would detect the loss themselves, but later, each with an error about another rank.

    Args:
        make_tasks: Returns the tasks of the ranks, before every start.
        hang_timeout: Seconds without a heartbeat after which a rank counts as hung; before its first one it never does.
        blocked_timeout: The same if all its threads are blocked.
        on_report: Called with the index of a rank's task, and its report.
    """

    def __init__(
        self,
        make_tasks: Callable[[], list[ChildTask]],
        budget: RestartBudget,
        *,
        hang_timeout: float = HANG_SECONDS,
        blocked_timeout: float = math.inf,
        on_report: Callable[[int, Report], None] = lambda _, __: None,
        on_change: Callable[[], None] = lambda: None,
        log: TextIO | None = None,
    ) -> None:
        super().__init__(budget, restart_success=False, on_change=on_change)
        self._make_tasks = make_tasks
        self._limits = SilenceLimits(hang_timeout, blocked_timeout)
        self._on_report = on_report
        self._log = log
        self._ranks: list[ChildLife] = []
        self.culprit = 0
        """The index of the rank that ended first, the last time."""

    def is_alive(self, place: int) -> bool:
        """Whether the process of this rank is alive."""
        return place < len(self._ranks) and self._ranks[place].child.is_alive

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all current ranks."""
        for rank in self._ranks:
            rank.child.send_signal(number)

    async def _live_once(self) -> ChildEnd:
        tasks = self._make_tasks()
        self._ranks = [
            ChildLife(task, partial(self._on_report, place), self._log, self._limits)
            for place, task in enumerate(tasks)
        ]
        lives = [asyncio.create_task(rank.run(self._started)) for rank in self._ranks]
        try:
            await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            self.culprit = self._first_ended(lives)
            if others := self._relevant_after(lives[self.culprit].result(), lives):
                await asyncio.wait(others, timeout=FAREWELL_SECONDS)
                self.culprit = self._first_ended(lives)
            return lives[self.culprit].result()
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)

    def _started(self, child: Child) -> None:
        if all(rank.child.is_alive for rank in self._ranks):
            self._on_change()
        if self._stopping.is_set():
            child.send_signal(signal.SIGTERM)

    def _relevant_after(self, end: ChildEnd, lives: list[asyncio.Task[ChildEnd]]) -> list[asyncio.Task[ChildEnd]]:
        """The ranks to wait for, because this end of the first one may not be the cause."""
        if end.exit_code == EXIT_DRAINED:
            return lives
        if not end.is_consequence:
            return []
        # The connections of a rank that fails may be closed long before its process has ended.
        return [life for rank, life in zip(self._ranks, lives, strict=True) if rank.is_failing]

    def _first_ended(self, lives: list[asyncio.Task[ChildEnd]]) -> int:
        """Of the ranks that have ended, one that failed, if there is one, and for a reason of its own if possible."""
        ends = {place: life.result() for place, life in enumerate(lives) if life.done()}
        return min(ends, key=lambda place: (ends[place].exit_code == EXIT_DRAINED, ends[place].is_consequence, place))
