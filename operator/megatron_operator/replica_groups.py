"""Replica groups as the pods show them: which attempt is the latest, how it stands, and what follows from a failure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_operator import names
from megatron_operator.api.v1alpha1 import FailurePolicy, MegatronInference, ReplicaGroupStatus
from megatron_operator.timestamps import seconds
from megatron_operator.world import Failure, ObservedPod, PodPhase, World

LOST_AFTER = 30.0
"""Seconds beyond its deletion deadline after which a pod counts as lost with its node."""

SERVING = "Serving"
UNSCHEDULABLE = "Unschedulable"
SCHEDULING_GATED = "SchedulingGated"
"""A queue, or whoever put a gate there, holds the pod back."""
STARTUP_TIMEOUT = "StartupTimeout"
LOST_RANK = "LostRank"
"""Why a pod ends whose ranks were left by another one: a consequence, and no cause."""
RENDEZVOUS_DONE = ("Loading", "Registering", SERVING)
"""Phases of a rank that has met all the others of its group."""


class ReplicaGroupState(StrEnum):
    """How the latest attempt of a group stands."""

    ABSENT = "Absent"
    STARTING = "Starting"
    READY = "Ready"
    FAILED = "Failed"
    LEAVING = "Leaving"


@dataclass(frozen=True)
class ReplicaGroupFailure:
    """What ended an attempt, or will: ``time`` is when, in seconds since the epoch."""

    attempt: int
    pod: str
    failure: Failure
    time: float
    restarts: int
    """Restarts counted against the budget before this failure."""


@dataclass(frozen=True)
class ReplicaGroup:
    """One replica group. ``pods`` are those of the latest attempt, without such as are lost with their node."""

    index: int
    size: int
    attempt: int | None = None
    """The latest attempt that was ever seen; None before the first."""
    pods: tuple[ObservedPod, ...] = ()
    old_pods: tuple[ObservedPod, ...] = ()
    """Pods of earlier attempts."""
    memory: ReplicaGroupStatus | None = None
    """What the last status said of the latest attempt."""

    @property
    def next_attempt(self) -> int:
        """A number whose pods' names were never used before.

        It depends on what was seen alone, so that a creation decided twice is the same creation.
        """
        return 0 if self.attempt is None else self.attempt + 1

    @property
    def restarts(self) -> int:
        """Restarts counted against the budget: attempts, and ranks restarted in place.

        The memory knows of those in place when the launcher that counted them has ended.
        """
        seen = max((pod.restarts for pod in self.pods), default=0) + sum(pod.launcher_restarts for pod in self.pods)
        return max(seen, self.memory.restarts if self.memory else 0)

    @property
    def first_pod(self) -> ObservedPod | None:
        """Index 0 of the latest attempt."""
        return next((pod for pod in self.pods if pod.index == 0), None)

    @property
    def live_pods(self) -> tuple[ObservedPod, ...]:
        """Pods of the latest attempt that would go on if nobody ended them."""
        return tuple(pod for pod in self.pods if not pod.finished and not pod.deleting)

    @property
    def ready_pods(self) -> int:
        """Pods of the latest attempt that are ready and stay."""
        return sum(pod_is_ready(pod) for pod in self.pods)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the latest attempt that have no pod."""
        present = {pod.index for pod in self.pods}
        return tuple(index for index in range(self.size) if index not in present)

    @property
    def template_hash(self) -> str | None:
        """Of the latest attempt; None when nothing is known of it."""
        if self.pods:
            return self.pods[0].template_hash
        return self.memory.template_hash if self.memory else None

    def failure(self, policy: FailurePolicy, now: float) -> ReplicaGroupFailure | None:
        """What ended the latest attempt: the first of its pods that finished, or a start that takes too long.

        Pods that only complain about others are asked last. When the pods are gone, the memory of it counts.
        """
        ended = [pod for pod in self.pods if pod.finished and not pod.deleting and not self._ended_with_first_pod(pod)]
        if ended:
            first = min(ended, key=lambda pod: (_is_consequence(pod), _end_of(pod), pod.index))
            return self._failure_of(first, first.failure or _unexplained(first), _end_of(first), policy)
        deadline = self.startup_deadline(policy)
        if deadline is not None and deadline <= now:
            late = self._late_pods
            were = f"{', '.join(pod.name for pod in late)} {'was' if len(late) == 1 else 'were'}"
            words = f"{were} not ready within {policy.startup_timeout.text}"
            return self._failure_of(late[0], Failure(STARTUP_TIMEOUT, words), deadline, policy)
        return self.recorded_failure if not self.pods else None

    def startup_deadline(self, policy: FailurePolicy) -> float | None:
        """When unready pods count as failed; None when there are none, or while one of them waits for a place.

        Pods that are placed wait for the others, so their time begins with that of the last one.
        """
        late = self._late_pods
        if not late or any(
            pod.waiting is not None and pod.waiting.reason in (UNSCHEDULABLE, SCHEDULING_GATED) for pod in late
        ):
            return None
        return max(pod.ready_changed_at or pod.created_at for pod in late) + policy.startup_timeout

    @property
    def _late_pods(self) -> tuple[ObservedPod, ...]:
        return tuple(pod for pod in self.live_pods if not pod.ready)

    @property
    def recorded_failure(self) -> ReplicaGroupFailure | None:
        """The failure of the latest attempt as the last status tells it."""
        last = self.memory.last_failure if self.memory else None
        if last is None or last.attempt != self.attempt:
            return None
        failure = Failure(last.reason, last.message, last.rank, last.exit_code)
        return ReplicaGroupFailure(last.attempt, last.pod, failure, seconds(last.time), self.restarts)

    @property
    def _is_missing_a_pod(self) -> bool:
        """Whether somebody removed a pod whose ranks the others have met; they can't meet those of another one."""
        return bool(self.missing) and any(pod.finished or pod.rank_phase in RENDEZVOUS_DONE for pod in self.pods)

    def _ended_with_first_pod(self, pod: ObservedPod) -> bool:
        """Whether its ranks ended well because the first pod, which somebody deleted, was at its end."""
        first = self.first_pod
        return pod.phase is PodPhase.SUCCEEDED and pod.index > 0 and (first is None or first.deleting)

    def _failure_of(
        self, pod: ObservedPod, failure: Failure, when: float, policy: FailurePolicy
    ) -> ReplicaGroupFailure:
        lived_long = when - pod.created_at >= policy.reset_after and failure.reason != STARTUP_TIMEOUT
        return ReplicaGroupFailure(pod.attempt, pod.name, failure, when, 0 if lived_long else self.restarts)

    def state(self, policy: FailurePolicy, now: float) -> ReplicaGroupState:
        """How the latest attempt stands. A pod that failed outweighs one that is being deleted."""
        if self.failure(policy, now) is not None:
            return ReplicaGroupState.FAILED
        if any(pod.deleting for pod in self.pods) or self._is_missing_a_pod:
            return ReplicaGroupState.LEAVING
        if not self.pods:
            return ReplicaGroupState.ABSENT
        return ReplicaGroupState.READY if self.ready_pods == self.size else ReplicaGroupState.STARTING


def observe_replica_groups(resource: MegatronInference, world: World) -> tuple[ReplicaGroup, ...]:
    """The wished groups, by index."""
    memories = {group.index: group for group in resource.status.replica_groups}
    return tuple(
        _observe_replica_group(resource, world, index, memories.get(index)) for index in range(resource.spec.replicas)
    )


def _observe_replica_group(
    resource: MegatronInference, world: World, index: int, memory: ReplicaGroupStatus | None
) -> ReplicaGroup:
    pods = sorted((pod for pod in world.pods if pod.group == index), key=lambda pod: pod.index)
    remembered = memory.attempt if memory else None
    attempt = max((each for each in (remembered, *(pod.attempt for pod in pods)) if each is not None), default=None)
    return ReplicaGroup(
        index=index,
        size=resource.spec.pods_per_group,
        attempt=attempt,
        pods=tuple(pod for pod in pods if pod.attempt == attempt and not is_lost(pod, world.now)),
        old_pods=tuple(pod for pod in pods if pod.attempt != attempt),
        memory=memory if remembered == attempt else None,
    )


def pod_is_ready(pod: ObservedPod) -> bool:
    """Whether the pod and the ranks in it serve."""
    serves = pod.rank_phase in (None, SERVING)
    return pod.phase is PodPhase.RUNNING and pod.ready and serves and not pod.deleting


def lost_at(pod: ObservedPod) -> float | None:
    """When a pod that is being deleted counts as lost with its node; None for one that is not being deleted."""
    return None if pod.deletion_deadline is None else pod.deletion_deadline + LOST_AFTER


def is_lost(pod: ObservedPod, now: float) -> bool:
    """Whether a pod should be gone for so long that nobody will say so any more."""
    deadline = lost_at(pod)
    return deadline is not None and deadline <= now


def pods_without_keys(resource: MegatronInference, world: World) -> tuple[ObservedPod, ...]:
    """Pods that run with keys of a Secret that somebody removed: nobody else has these keys any more.

    None while a Secret of others has its name: new keys could not be made, so the pods are left as they are.
    """
    if names.keys_child(resource.name) in {*world.children, *world.taken}:
        return ()
    return tuple(pod for pod in world.pods if not pod.finished and not is_lost(pod, world.now))


def _is_consequence(pod: ObservedPod) -> bool:
    return pod.failure is not None and pod.failure.reason == LOST_RANK


def _end_of(pod: ObservedPod) -> float:
    return pod.finished_at or pod.created_at


def _unexplained(pod: ObservedPod) -> Failure:
    if pod.phase is PodPhase.SUCCEEDED:
        return Failure("Completed", f"{pod.name} ended without an error although it should run", exit_code=0)
    return Failure("PodFailed", f"{pod.name} failed without saying why")
