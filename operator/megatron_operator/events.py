"""Kubernetes events for the differences between two statuses, one for each transition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron_operator.api.v1alpha1 import Condition, ConditionType, MegatronInferenceStatus, Phase, ReplicaGroupStatus
from megatron_operator.conditions import GROUP_FAILED, IDLE_STOPPED, NO_ROOM, NODE_CORDONED

REPORTED_PROGRESS = ("ScalingDown", "RollingOut", "RotatingKeys", NODE_CORDONED, NO_ROOM)
"""Reasons of Progressing that have an event of their own."""


class EventType(StrEnum):
    """The two event types of Kubernetes."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class Event:
    """One event, without the object that it is about."""

    type: EventType
    reason: str
    message: str


def events_between(before: MegatronInferenceStatus, after: MegatronInferenceStatus) -> tuple[Event, ...]:
    """The events for the change from ``before`` to ``after``."""
    return (
        *_image_events(before, after),
        *_group_events(before, after),
        *_leader_events(before, after),
        *_warnings(before, after),
        *_engine_events(before, after),
        *_activation_events(before, after),
        *_progress_events(before, after),
    )


def _image_events(before: MegatronInferenceStatus, after: MegatronInferenceStatus) -> Iterator[Event]:
    if before.image is not None and after.image is not None and before.image != after.image:
        words = f"the image of the runtime changes from {before.image} to {after.image}"
        yield Event(EventType.NORMAL, "ImageChanged", words)


def _group_events(before: MegatronInferenceStatus, after: MegatronInferenceStatus) -> Iterator[Event]:
    known = {group.index: group for group in before.replica_groups}
    for group in after.replica_groups:
        old = known.get(group.index, ReplicaGroupStatus(index=group.index))
        failure = group.last_failure
        if failure is not None and failure != old.last_failure:
            rank = "" if failure.rank is None else f" rank {failure.rank}"
            place = f"replica group {group.index}, attempt {failure.attempt}, {failure.pod}{rank}"
            words = f"{place}: {failure.reason}: {failure.message}"
            yield Event(EventType.WARNING, GROUP_FAILED, words)
        if group.attempt is not None and group.attempt != old.attempt:
            words = f"replica group {group.index} starts attempt {group.attempt} on {group.total_pods} pod(s)"
            yield Event(EventType.NORMAL, "AttemptStarted", words)


def _leader_events(before: MegatronInferenceStatus, after: MegatronInferenceStatus) -> Iterator[Event]:
    """The leader moved to another replica group. A new attempt of the same group has its own event."""
    was, now = before.leader, after.leader
    if was is not None and now is not None and was.replica_group != now.replica_group:
        words = f"{now.pod} is the leader, after {was.pod}: it runs the coordinator (epoch {now.epoch})"
        yield Event(EventType.NORMAL, "LeaderMoved", words)


def _warnings(before: MegatronInferenceStatus, after: MegatronInferenceStatus) -> Iterator[Event]:
    """Conditions that no event of a replica group covers."""
    told: set[str] = {GROUP_FAILED}
    for kind in (ConditionType.FAILED, ConditionType.DEGRADED):
        condition = after.condition(kind)
        if condition is None or not _is_news(before.condition(kind), condition) or condition.reason in told:
            continue
        told.add(condition.reason)
        yield Event(EventType.WARNING, condition.reason, condition.message)
    ready, was_ready = after.condition(ConditionType.READY), before.condition(ConditionType.READY)
    lost = ready is not None and ready.status == "Unknown" and (was_ready is None or was_ready.status != "Unknown")
    if ready is not None and lost and ready.reason not in told:
        yield Event(EventType.WARNING, ready.reason, ready.message)


def _is_news(before: Condition | None, after: Condition) -> bool:
    was = (before.status, before.reason) if before else ("False", "")
    return after.status == "True" and was != ("True", after.reason)


def _engine_events(before: MegatronInferenceStatus, after: MegatronInferenceStatus) -> Iterator[Event]:
    if after.phase is before.phase:
        return
    told = {
        Phase.PAUSED: ("Paused", "the engine is paused; requests wait"),
        Phase.SUSPENDED: ("Suspended", "the engine is suspended; the memory of its KV cache is released"),
        Phase.STOPPED: ("Stopped", "all pods have ended"),
    }
    if after.phase in told:
        yield Event(EventType.NORMAL, *told[after.phase])
    available, was = after.condition(ConditionType.AVAILABLE), before.condition(ConditionType.AVAILABLE)
    if available is not None and available.status == "True" and (was is None or was.status != "True"):
        yield Event(EventType.NORMAL, "Available", f"{after.model_name} answers at {after.url}")


def _activation_events(before: MegatronInferenceStatus, after: MegatronInferenceStatus) -> Iterator[Event]:
    if before.idle_stop_time is None and after.idle_stop_time is not None:
        yield Event(EventType.NORMAL, IDLE_STOPPED, "the model was idle; its pods are stopped until the next request")
    if before.idle_stop_time is not None and after.idle_stop_time is None:
        yield Event(EventType.NORMAL, "Activated", "the model is needed again; its pods start, or stay")


def _progress_events(before: MegatronInferenceStatus, after: MegatronInferenceStatus) -> Iterator[Event]:
    progress = after.condition(ConditionType.PROGRESSING)
    if (
        progress is not None
        and progress.reason in REPORTED_PROGRESS
        and _is_news(before.condition(ConditionType.PROGRESSING), progress)
    ):
        kind = EventType.WARNING if progress.reason == NO_ROOM else EventType.NORMAL
        yield Event(kind, progress.reason, progress.message)
