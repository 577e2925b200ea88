"""A snapshot of a local session for its views: the resource, its status and its pods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megatron_operator.api.v1alpha1 import ConditionType, MegatronInference, MegatronInferenceStatus
from megatron_operator.observed_state import ObservedPod, ObservedState, PodPhase


@dataclass(frozen=True)
class Snapshot:
    """One snapshot. ``problems`` are errors of the file that do not stop the session; ``elapsed`` are the seconds since
    its start."""

    resource: MegatronInference
    status: MegatronInferenceStatus
    observed: ObservedState
    problems: tuple[str, ...] = ()
    ending: bool = False
    elapsed: float = 0.0
    tokens_per_second: float = 0.0

    @property
    def pods(self) -> tuple[ObservedPod, ...]:
        """By group, then by attempt."""
        return tuple(sorted(self.observed.pods, key=lambda pod: (pod.group, pod.attempt, pod.index)))

    def replica_state(self, pod: ObservedPod) -> str:
        """The engine state of the pod's replica group; a dash when the coordinator does not report it."""
        replicas = self.observed.engine.replicas if self.observed.engine else ()
        known = (str(replica.state) for replica in replicas if replica.group == pod.group)
        return "-" if pod.finished else next(known, "-")

    def holds(self, kind: ConditionType) -> bool:
        """Whether a condition is True."""
        condition = self.status.condition(kind)
        return condition is not None and condition.status == "True"

    def failures(self) -> Iterator[str]:
        """The failures of replica groups, as their pods reported them."""
        for group in self.status.replica_groups:
            failure = group.last_failure
            if failure is not None:
                yield f"{failure.pod}: {failure.reason}: {failure.message}"


def pod_state(pod: ObservedPod) -> str:
    """The state of a pod in one word."""
    if pod.deleting:
        return "Ending"
    if pod.phase is PodPhase.RUNNING:
        return "Ready" if pod.ready else pod.rank_phase or "Starting"
    return str(pod.phase)


class View(Protocol):
    """A view of a session."""

    def show(self, snapshot: Snapshot) -> None:
        """Called at every step, with or without changes."""
        ...

    def say(self, text: str) -> None:
        """Print a permanent line: an event, a hint, an answer."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...
