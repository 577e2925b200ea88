"""The ranks of this pod by replica group: their reports and restarts."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_runtime.launch.options import LaunchOptions
from megatron_runtime.launch.pod_state import PodState, RankPhase
from megatron_runtime.launch.tasks import RANK_MODULE, PendingPlan, first_rank, rank_environment, replica_group_tasks
from megatron_runtime.processes.child import Report
from megatron_runtime.processes.fork_server import spawner_of
from megatron_runtime.processes.hang_detection import BLOCKED_SECONDS
from megatron_runtime.processes.replica_group_supervisor import ReplicaGroupSupervisor
from megatron_runtime.processes.supervisor import ChildEnd, RestartBudget

DRAIN_GRACE = 3.0
"""Seconds beyond the drain time after which a rank is killed. A rank stops computing at the end of the drain time."""
FOLLOWER_GRACE = 10.0
"""The same for ranks whose first rank is in another pod, which releases them after its drain."""


class PodRanks:
    """Starts the ranks, and restarts those of a replica group together, within a budget that all groups share.

    Args:
        on_end: Called with the rank that ended first and how it ended, once its replica group is not restarted.
        on_change: Called when a replica group was restarted.
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
        # Restarted ranks could not join those of the other pods, which end too.
        self._budget = RestartBudget(
            0 if options.spans_pods else options.max_restarts, reset_after=options.restart_reset_after
        )
        self._spawner = spawner_of(
            "fork server of the ranks", RANK_MODULE, rank_environment(options), hang_timeout=options.hang_timeout
        )
        self._supervisors: dict[range, ReplicaGroupSupervisor] = {}
        self._lives: list[asyncio.Task[None]] = []

    @property
    def restarts(self) -> int:
        """Restarts of all replica groups together."""
        return sum(supervisor.restarts for supervisor in self._supervisors.values())

    def start(self, plan: PendingPlan, *, key: str | None) -> None:
        """Start all ranks of this pod: they import their modules, and load the checkpoint once ``plan`` is ready."""
        first, size = first_rank(self._options), self._options.local_ranks_per_replica_group
        for start in range(first, first + self._options.local_ranks, size):
            ranks = range(start, start + size)
            self._supervisors[ranks] = ReplicaGroupSupervisor(
                partial(replica_group_tasks, self._options, plan, ranks=ranks, key=key, spawner=self._spawner),
                self._budget,
                hang_timeout=self._options.hang_timeout,
                # A driver of GPUs may wait for longer; nothing has measured that.
                blocked_timeout=BLOCKED_SECONDS if self._options.engine.device == "cpu" else math.inf,
                on_report=partial(self._report, ranks),
                on_change=partial(self._note, ranks),
            )
            self._lives.append(asyncio.create_task(self._live(ranks)))

    async def drain(self, timeout: float) -> None:
        """Let the engines finish their requests; kills the remaining ranks some time after ``timeout`` seconds."""
        for supervisor in self._supervisors.values():
            supervisor.release()
            supervisor.send_signal(signal.SIGTERM)
        await self._spawner.close()  # ranks that are about to start do not
        if self._lives:
            grace = DRAIN_GRACE if self._options.has_first_rank else FOLLOWER_GRACE
            await asyncio.wait(self._lives, timeout=timeout + grace)
        await self.kill()

    async def kill(self) -> None:
        """Ends all ranks at once."""
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await self._spawner.close()

    async def _live(self, ranks: range) -> None:
        supervisor = self._supervisors[ranks]
        end = await supervisor.run()
        self._on_end(ranks[supervisor.culprit], end)

    def _report(self, ranks: range, place: int, report: Report) -> None:
        if "registered" in report:
            self._state.update_rank(ranks[place], registered=bool(report["registered"]))
        if "phase" not in report:
            return
        changes: dict[str, Any] = {"phase": RankPhase(report["phase"]), "message": str(report.get("message", ""))}
        if "totalBytes" in report:
            changes |= {"loaded_bytes": int(report["loadedBytes"]), "total_bytes": int(report["totalBytes"])}
        self._state.update_rank(ranks[place], **changes)

    def _note(self, ranks: range) -> None:
        for place, rank in enumerate(ranks):
            alive = self._supervisors[ranks].is_alive(place)
            phase = RankPhase.STARTING if alive else RankPhase.EXITED
            self._state.update_rank(rank, phase=phase, loaded_bytes=0, registered=False)
        self._on_change()
