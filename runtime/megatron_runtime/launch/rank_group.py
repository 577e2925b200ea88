"""The ranks of this pod: what they report, and their restarts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_runtime.launch.child import Report
from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.keeper import ChildEnd, Keeper, RestartBudget
from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.pod_state import PodState, RankPhase
from megatron_runtime.launch.preflight import EnginePlan
from megatron_runtime.launch.tasks import first_rank, rank_task

DRAIN_GRACE = 3.0
"""Seconds beyond the time to drain before a rank is killed; it stops computing by itself before."""


class RankGroup:
    """Starts the ranks and starts them again within the budget that they share.

    In a group that spans several pods a rank can't come back alone, so there its first end is final.

    Args:
        on_end: Called with the rank and how it ended, once it is not started again.
        on_change: Called when a rank was restarted.
    """

    def __init__(
        self,
        options: LaunchOptions,
        state: PodState,
        *,
        on_end: Callable[[int, ChildEnd], None],
        on_change: Callable[[], None],
    ) -> None:
        self._options = options
        self._state = state
        self._on_end = on_end
        self._on_change = on_change
        spans_pods = options.engine.ranks_per_group > options.group_ranks
        limit = 0 if spans_pods else options.max_restarts
        self._budget = RestartBudget(limit, reset_after=options.restart_reset_after)
        self._keepers: dict[int, Keeper] = {}
        self._lives: list[asyncio.Task[None]] = []

    @property
    def restarts(self) -> int:
        """Restarts of all ranks together."""
        return sum(keeper.restarts for keeper in self._keepers.values())

    def start(self, facts: CheckpointFacts, plan: EnginePlan, *, address: str, key: str | None) -> None:
        """Starts all ranks of this pod."""
        first = first_rank(self._options)
        for rank in range(first, first + self._options.local_ranks):
            self._keepers[rank] = Keeper(
                partial(rank_task, self._options, facts, plan, rank=rank, address=address, key=key),
                self._budget,
                restart_success=False,
                hang_timeout=self._options.hang_timeout,
                on_report=partial(self._report, rank),
                on_change=partial(self._note, rank),
            )
            self._lives.append(asyncio.create_task(self._live(rank)))

    async def drain(self, timeout: float) -> None:
        """Has the engines finish what they have; kills what is left after ``timeout`` seconds and a little."""
        for keeper in self._keepers.values():
            keeper.release()
            keeper.send_signal(signal.SIGTERM)
        if self._lives:
            await asyncio.wait(self._lives, timeout=timeout + DRAIN_GRACE)
        await self.kill()

    async def kill(self) -> None:
        """Ends all ranks at once."""
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    async def _live(self, rank: int) -> None:
        self._on_end(rank, await self._keepers[rank].run())

    def _report(self, rank: int, report: Report) -> None:
        if "phase" not in report:
            return
        changes: dict[str, Any] = {"phase": RankPhase(report["phase"]), "message": str(report.get("message", ""))}
        if "totalBytes" in report:
            changes |= {"loaded_bytes": int(report["loadedBytes"]), "total_bytes": int(report["totalBytes"])}
        self._state.update_rank(rank, **changes)

    def _note(self, rank: int) -> None:
        child = self._keepers[rank].child
        alive = child is not None and child.is_alive
        self._state.update_rank(rank, phase=RankPhase.STARTING if alive else RankPhase.EXITED, loaded_bytes=0)
        self._on_change()
