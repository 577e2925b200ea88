"""The world, put together from pods as they were found and what their launchers answered. Shared by both adapters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from megatron_operator.engine import PodReport
from megatron_operator.hearing import Answer, Silence
from megatron_operator.leadership import current_leader
from megatron_operator.world import ObservedEngine, ObservedPod, World


def observed_world(
    seen: Iterable[tuple[ObservedPod | None, Answer]],
    children: Mapping[str, str],
    *,
    taken: frozenset[str] = frozenset(),
    url: str | None = None,
) -> World:
    """``seen`` is every pod with its answer; None stands for a pod that is not of a group attempt."""
    ours = [(with_report(pod, answer), answer) for pod, answer in seen if pod is not None]
    return World(
        now=time.time(),
        pods=tuple(pod for pod, _ in ours),
        engine=_leaders_word(ours),
        children=children,
        taken=taken,
        url=url,
    )


def with_report(pod: ObservedPod, answer: Answer) -> ObservedPod:
    """The pod with what its launcher says about it, or since when it says nothing."""
    if not isinstance(answer, PodReport):
        return replace(pod, silent_since=pod.created_at if answer is None else answer.since)
    return replace(
        pod,
        rank_phase=answer.rank_phase,
        loading=answer.loading,
        launcher_restarts=answer.restarts,
        leads=answer.leads,
        told_epoch=answer.epoch,
        registered=answer.registered,
    )


def _leaders_word(answers: Iterable[tuple[ObservedPod, Answer]]) -> ObservedEngine | None:
    """What the leader said; None when there is none, or it is about to end."""
    said = {pod.uid: (pod, answer) for pod, answer in answers}
    leader = current_leader(pod for pod, _ in said.values())
    if leader is None or leader.deleting:
        return None
    match said[leader.uid][1]:
        case PodReport() as report:
            return report.engine
        case Silence() as silence:
            return ObservedEngine(reachable=False, message=silence.why)
        case None:
            return ObservedEngine(reachable=False, message="the leader pod has not started yet")
