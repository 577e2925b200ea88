"""Observation of pods: polls their control APIs, and assembles the ``ObservedState`` from the answers.

Both adapters use it, ``kubernetes`` and ``local``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_operator.control_client import ControlApiUnreachable, ControlClient, PodReport
from megatron_operator.downloads import ObservedDownload
from megatron_operator.leader_selection import current_leader
from megatron_operator.observed_state import ObservedEngine, ObservedPod, ObservedState

RESPONSIVE_WAIT = 3.0
"""Seconds that an observation waits for a pod that answered the previous poll."""
UNRESPONSIVE_WAIT = 0.5
"""Seconds that an observation waits for a pod that did not. A hanging pod must not delay the reaction to it."""


@dataclass(frozen=True)
class NoAnswer:
    """A failed poll. ``since`` is the start of the first poll that failed, in seconds since the epoch."""

    since: float
    cause: str


Answer = PodReport | NoAnswer | None
"""The result of a poll; None for a pod that has no control API yet."""


class ControlApiPoller:
    """Polls the pods of one resource and records since when a pod has not answered.

    A poll that exceeds the wait of an observation continues in the background until its client times out. The poller
    calls ``on_late_answer`` when such a poll succeeds.
    """

    def __init__(self, on_late_answer: Callable[[], None]) -> None:
        self._on_late_answer = on_late_answer
        self._unanswered: dict[str, NoAnswer] = {}
        self._polls: dict[str, asyncio.Task[PodReport | ControlApiUnreachable]] = {}

    async def poll(self, control_client: ControlClient, uid: str, address: str) -> PodReport | NoAnswer:
        """The report of the pod with this ``uid``. Polls of the same pod must not overlap."""
        began = time.time()
        known = self._unanswered.get(uid)
        if (poll := self._polls.get(uid)) is None:
            poll = asyncio.create_task(control_client.try_state(address), name=f"poll of {address}")
            self._polls[uid] = poll
        done, _ = await asyncio.wait({poll}, timeout=RESPONSIVE_WAIT if known is None else UNRESPONSIVE_WAIT)
        if not done:
            poll.add_done_callback(lambda late: self._complete_late(uid, late))
            return self._record(uid, began, f"control API at {address} does not answer")
        self._polls.pop(uid, None)
        answer = poll.result()
        if isinstance(answer, ControlApiUnreachable):
            return self._record(uid, began, str(answer))
        self._unanswered.pop(uid, None)
        return answer

    async def keep_only(self, uids: Collection[str]) -> None:
        """Drop the records and polls of all other pods."""
        self._unanswered = {uid: each for uid, each in self._unanswered.items() if uid in uids}
        await self._cancel(self._polls.keys() - set(uids))

    async def close(self) -> None:
        """Cancel all polls."""
        await self._cancel(set(self._polls))

    def _record(self, uid: str, began: float, cause: str) -> NoAnswer:
        """The record has the latest cause and the time of the first failed poll."""
        known = self._unanswered.get(uid)
        failed = NoAnswer(began if known is None else known.since, cause)
        self._unanswered[uid] = failed
        return failed

    def _complete_late(self, uid: str, poll: asyncio.Task[PodReport | ControlApiUnreachable]) -> None:
        if self._polls.get(uid) is not poll:
            return
        del self._polls[uid]
        if not poll.cancelled() and isinstance(poll.result(), PodReport):
            self._unanswered.pop(uid, None)
            self._on_late_answer()

    async def _cancel(self, uids: Collection[str]) -> None:
        polls = [self._polls.pop(uid) for uid in uids]
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)


def observed_state(
    seen: Iterable[tuple[ObservedPod | None, Answer]],
    children: Mapping[str, str],
    *,
    taken: frozenset[str] = frozenset(),
    orphans: Iterable[ObservedPod] = (),
    gang_kinds: frozenset[str] = frozenset(),
    budget_kind: str | None = None,
    cordoned_nodes: frozenset[str] | None = None,
    downloads: Iterable[ObservedDownload] = (),
    cache_nodes: tuple[str, ...] | None = (),
    url: str | None = None,
) -> ObservedState:
    """``seen`` is every pod with its answer; None stands for a pod that is not part of a group attempt."""
    ours = [(with_report(pod, answer), answer) for pod, answer in seen if pod is not None]
    return ObservedState(
        now=time.time(),
        pods=tuple(pod for pod, _ in ours),
        orphans=tuple(orphans),
        engine=_engine_of_leader(ours),
        children=children,
        taken=taken,
        gang_kinds=gang_kinds,
        budget_kind=budget_kind,
        cordoned_nodes=cordoned_nodes,
        downloads=tuple(downloads),
        cache_nodes=cache_nodes,
        url=url,
    )


def with_report(pod: ObservedPod, answer: Answer) -> ObservedPod:
    """The pod with its launcher's report, or with the time since when the launcher has not answered."""
    if not isinstance(answer, PodReport):
        return replace(pod, unreachable_since=pod.created_at if answer is None else answer.since)
    return replace(
        pod,
        rank_phase=answer.rank_phase,
        loading=answer.loading,
        launcher_restarts=answer.restarts,
        reports_leader=answer.reports_leader,
        known_epoch=answer.epoch,
        registered=answer.registered,
    )


def _engine_of_leader(answers: Iterable[tuple[ObservedPod, Answer]]) -> ObservedEngine | None:
    """The engine as the leader reports it; None without a leader, or while the leader pod is being deleted."""
    by_uid = {pod.uid: (pod, answer) for pod, answer in answers}
    leader = current_leader(pod for pod, _ in by_uid.values())
    if leader is None or leader.deleting:
        return None
    match by_uid[leader.uid][1]:
        case PodReport() as report:
            return report.engine
        case NoAnswer() as failed:
            return ObservedEngine(reachable=False, message=failed.cause)
        case None:
            return ObservedEngine(reachable=False, message="the leader pod has not started yet")
