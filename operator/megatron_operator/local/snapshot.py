"""What a person is shown of a local session: the resource, its status, and its pods at one moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megatron_operator.api.v1alpha1 import ConditionType, MegatronInference, Status
from megatron_operator.world import ObservedPod, PodPhase, World


@dataclass(frozen=True)
class Snapshot:
    """One moment. ``problems`` are complaints about the file that the session goes on in spite of."""

    resource: MegatronInference
    status: Status
    world: World
    problems: tuple[str, ...] = ()
    ending: bool = False

    @property
    def pods(self) -> tuple[ObservedPod, ...]:
        """By group, then by attempt."""
        return tuple(sorted(self.world.pods, key=lambda pod: (pod.group, pod.attempt, pod.index)))

    def replica_state(self, pod: ObservedPod) -> str:
        """The engine's state in the pod's group; a dash where the coordinator knows none."""
        replicas = self.world.engine.replicas if self.world.engine else ()
        known = (str(replica.state) for replica in replicas if replica.group == pod.group)
        return "-" if pod.finished else next(known, "-")

    def holds(self, kind: ConditionType) -> bool:
        """Whether a condition is True."""
        condition = self.status.condition(kind)
        return condition is not None and condition.status == "True"

    def failures(self) -> Iterator[str]:
        """Why groups failed, in the words of their pods."""
        for group in self.status.replica_groups:
            failure = group.last_failure
            if failure is not None:
                yield f"{failure.pod}: {failure.reason}: {failure.message}"


def pod_state(pod: ObservedPod) -> str:
    """One word for what a pod is doing."""
    if pod.deleting:
        return "Ending"
    if pod.phase is PodPhase.RUNNING:
        return "Ready" if pod.ready else pod.rank_phase or "Starting"
    return str(pod.phase)


class View(Protocol):
    """Shows a session to a person."""

    def show(self, snapshot: Snapshot) -> None:
        """Called at every step, whether or not something changed."""
        ...

    def say(self, text: str) -> None:
        """A line that stays: an event, a hint, an answer."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...
