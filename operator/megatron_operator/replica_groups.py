"""Replica groups as observed: the latest attempt of each, its state, and its failure."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_operator import names
from megatron_operator.api.v1alpha1 import FailurePolicy, MegatronInference, ReplicaGroupStatus
from megatron_operator.observed_state import Failure, ObservedPod, ObservedState, PodPhase
from megatron_operator.timestamps import seconds

LOST_AFTER = 30.0
"""Seconds after its deletion deadline at which a pod counts as lost with its node."""

SERVING = "Serving"
UNSCHEDULABLE = "Unschedulable"
SCHEDULING_GATED = "SchedulingGated"
"""A scheduling gate holds the pod back, such as the one of a queue."""
STARTUP_TIMEOUT = "StartupTimeout"
GANG_TIMEOUT = "GangTimeout"
"""Reason of a group that gave the nodes of its pods back, because its other pods found none."""
GANG_PAUSE = 60.0
"""Seconds from the time at which a group gives its nodes back to its next attempt: enough for its pods to end, and for
the scheduler to place the pods of another group."""
LOST_RANK = "LostRank"
"""Reason of a pod whose ranks lost a rank of another pod. It is a consequence, not a cause."""
RENDEZVOUS_DONE = ("Loading", "Registering", SERVING)
"""Phases of a rank that has completed the rendezvous of its group."""


class ReplicaGroupState(StrEnum):
    """State of the latest attempt of a replica group."""

    ABSENT = "Absent"
    STARTING = "Starting"
    READY = "Ready"
    FAILED = "Failed"
    LEAVING = "Leaving"


@dataclass(frozen=True)
class ReplicaGroupFailure:
    """What ended an attempt, or will end it. ``time`` is in seconds since the epoch."""

    attempt: int
    pod: str
    failure: Failure
    time: float
    restarts: int
    """Restarts counted against the budget before this failure."""


@dataclass(frozen=True)
class ReplicaGroup:
    """One replica group. ``pods`` are those of the latest attempt, except pods that are lost with their node."""

    index: int
    size: int
    attempt: int | None = None
    """The latest attempt that was ever observed; None before the first."""
    pods: tuple[ObservedPod, ...] = ()
    old_pods: tuple[ObservedPod, ...] = ()
    """Pods of earlier attempts."""
    memory: ReplicaGroupStatus | None = None
    """The group's entry in the last status, if it is about the latest attempt."""
    may_give_back: bool = False
    """Whether no other group of the resource gives its nodes back before this one."""

    @property
    def next_attempt(self) -> int:
        """A number whose pod names were never used.

        It depends on the observed state alone, so that two plans for the same state create the same pods.
        """
        return 0 if self.attempt is None else self.attempt + 1

    @property
    def restarts(self) -> int:
        """Restarts counted against the budget: attempts, and ranks that a launcher restarted in place.

        The last status keeps the in-place restarts of a launcher that has ended.
        """
        seen = max((pod.restarts for pod in self.pods), default=0) + sum(pod.launcher_restarts for pod in self.pods)
        return max(seen, self.memory.restarts if self.memory else 0)

    @property
    def first_pod(self) -> ObservedPod | None:
        """The pod with index 0 of the latest attempt."""
        return next((pod for pod in self.pods if pod.index == 0), None)

    @property
    def live_pods(self) -> tuple[ObservedPod, ...]:
        """Pods of the latest attempt that run and are not being deleted."""
        return tuple(pod for pod in self.pods if not pod.finished and not pod.deleting)

    @property
    def is_scheduled(self) -> bool:
        """Whether a running pod of the latest attempt has a node."""
        return any(pod.startup_since is not None for pod in self.live_pods)

    @property
    def ready_pods(self) -> int:
        """Number of ready pods of the latest attempt that are not being deleted."""
        return sum(pod_is_ready(pod) for pod in self.pods)

    @property
    def has_served(self) -> bool:
        """Whether all pods of the latest attempt are ready or were, so that an unready group may become ready again."""
        return bool(self.pods) and all(pod.ready or _was_ready(pod) for pod in self.pods)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the latest attempt without a pod."""
        present = {pod.index for pod in self.pods}
        return tuple(index for index in range(self.size) if index not in present)

    @property
    def template_hash(self) -> str | None:
        """Template hash of the latest attempt; None when it is unknown."""
        if self.pods:
            return self.pods[0].template_hash
        return self.memory.template_hash if self.memory else None

    def failure(self, policy: FailurePolicy, now: float) -> ReplicaGroupFailure | None:
        """The failure of the latest attempt: the first pod that ended, or a startup timeout.

        Pods that report a lost rank of another pod come last, after a pod that the cluster ends. Without pods, the
        failure in the last status counts.
        """
        ended = [pod for pod in self.pods if pod.finished and not pod.deleting and not self._ended_with_first_pod(pod)]
        if ended:
            first = min(ended, key=lambda pod: (_is_consequence(pod), _end_of(pod), pod.index))
            disrupted = next((pod for pod in self.pods if pod.disruption is not None), None)
            if disrupted is not None and disrupted.disruption is not None and _is_consequence(first):
                return self._failure_of(disrupted, disrupted.disruption, _end_of(first), policy)
            return self._failure_of(first, first.failure or _unexplained(first), _end_of(first), policy)
        deadline = self.startup_deadline(policy)
        if deadline is not None and deadline <= now:
            late = self._late_pods
            were = f"{', '.join(pod.name for pod in late)} {'was' if len(late) == 1 else 'were'}"
            words = f"{were} not ready within {policy.startup_timeout.text}"
            return self._failure_of(late[0], Failure(STARTUP_TIMEOUT, words), deadline, policy)
        if (at := self.gang_deadline(policy)) is not None and at <= now:
            return self._gang_timeout(policy, now)
        return self.recorded_failure if not self.pods else None

    @property
    def is_incomplete(self) -> bool:
        """Whether some of its pods hold nodes while others are not scheduled."""
        scheduled = [pod.startup_since is not None for pod in self.live_pods]
        return any(scheduled) and not all(scheduled)

    def gang_deadline(self, policy: FailurePolicy) -> float | None:
        """When the group gives its nodes back, because no further pod was scheduled; None if it does not have to.

        The deadline is up to twice the timeout, by the uid of a pod. So groups of several resources that wait for each
        other's nodes do not give them back at the same time, and one of them completes.
        """
        if not (self.may_give_back and self.is_incomplete and policy.gang_timeout > 0):
            return None
        last = max(pod.startup_since for pod in self.live_pods if pod.startup_since is not None)
        return last + policy.gang_timeout * (1 + zlib.crc32(self.pods[0].uid.encode()) / 2**32)

    def _gang_timeout(self, policy: FailurePolicy, now: float) -> ReplicaGroupFailure:
        """The next attempt waits from ``now`` on, because the pods hold their nodes until then."""
        holding = [pod for pod in self.live_pods if pod.startup_since is not None]
        without = ", ".join(pod.name for pod in self.live_pods if pod.startup_since is None)
        words = f"gives its node back, because {without} found none within {policy.gang_timeout.text} or more"
        return self._failure_of(holding[0], Failure(GANG_TIMEOUT, words, disruption=True), now, policy)

    def startup_deadline(self, policy: FailurePolicy) -> float | None:
        """When unready pods count as failed; None without such pods, or while one is not scheduled.

        Scheduled pods wait for the others, so the timeout begins with the pod whose start began last. A pod that was
        ready has the whole timeout to become ready again.
        """
        starts = [pod.startup_since for pod in self._late_pods]
        begun = [start for start in starts if start is not None]
        if not starts or len(begun) < len(starts):
            return None
        changes = [pod.ready_changed_at for pod in self._late_pods if pod.ready_changed_at is not None]
        return max(*begun, *changes, 0.0) + policy.startup_timeout

    @property
    def _late_pods(self) -> tuple[ObservedPod, ...]:
        return tuple(pod for pod in self.live_pods if not pod.ready)

    @property
    def recorded_failure(self) -> ReplicaGroupFailure | None:
        """The failure of the latest attempt as the last status has it."""
        last = self.memory.last_failure if self.memory else None
        if last is None or last.attempt != self.attempt:
            return None
        failure = Failure(last.reason, last.message, last.rank, last.exit_code, last.disruption)
        return ReplicaGroupFailure(last.attempt, last.pod, failure, seconds(last.time), self.restarts)

    @property
    def _is_missing_a_pod(self) -> bool:
        """Whether a pod was deleted whose ranks had joined the group. The others cannot join the ranks of a new pod."""
        return bool(self.missing) and any(pod.finished or pod.rank_phase in RENDEZVOUS_DONE for pod in self.pods)

    def _ended_with_first_pod(self, pod: ObservedPod) -> bool:
        """Whether a pod ended successfully because the first pod of its group was deleted."""
        first = self.first_pod
        return pod.phase is PodPhase.SUCCEEDED and pod.index > 0 and (first is None or first.deleting)

    def _failure_of(
        self, pod: ObservedPod, failure: Failure, when: float, policy: FailurePolicy
    ) -> ReplicaGroupFailure:
        lived_long = when - pod.created_at >= policy.reset_after and failure.reason != STARTUP_TIMEOUT
        return ReplicaGroupFailure(pod.attempt, pod.name, failure, when, 0 if lived_long else self.restarts)

    def state(self, policy: FailurePolicy, now: float) -> ReplicaGroupState:
        """State of the latest attempt. A failed pod outweighs one that is being deleted."""
        if self.failure(policy, now) is not None:
            return ReplicaGroupState.FAILED
        if any(pod.deleting for pod in self.pods) or self._is_missing_a_pod:
            return ReplicaGroupState.LEAVING
        if not self.pods:
            return ReplicaGroupState.ABSENT
        return ReplicaGroupState.READY if self.ready_pods == self.size else ReplicaGroupState.STARTING


def observe_replica_groups(
    resource: MegatronInference, observed: ObservedState, count: int | None = None
) -> tuple[ReplicaGroup, ...]:
    """The first ``count`` replica groups, by index; without it, the desired ones."""
    memories = {group.index: group for group in resource.status.replica_groups}
    pods: dict[int, list[ObservedPod]] = defaultdict(list)
    for pod in sorted(observed.pods, key=lambda pod: pod.index):
        pods[pod.group].append(pod)
    groups = [
        _observe_replica_group(resource, observed, index, pods.get(index, []), memories.get(index))
        for index in range(resource.spec.replicas if count is None else count)
    ]
    first = _first_to_give_back(groups, observed.now)
    return tuple(replace(group, may_give_back=True) if group is first else group for group in groups)


def _first_to_give_back(groups: Sequence[ReplicaGroup], now: float) -> ReplicaGroup | None:
    """The group whose turn it is to give its nodes back: the incomplete one with the highest index, unless a group has
    just done so."""
    recorded = [group.recorded_failure for group in groups]
    if any(each and each.failure.reason == GANG_TIMEOUT and now < each.time + GANG_PAUSE for each in recorded):
        return None
    return next((group for group in reversed(groups) if group.is_incomplete), None)


def _observe_replica_group(
    resource: MegatronInference,
    observed: ObservedState,
    index: int,
    pods: Sequence[ObservedPod],
    memory: ReplicaGroupStatus | None,
) -> ReplicaGroup:
    """``pods`` are all pods of the group, by index."""
    remembered = memory.attempt if memory else None
    attempt = max((each for each in (remembered, *(pod.attempt for pod in pods)) if each is not None), default=None)
    return ReplicaGroup(
        index=index,
        size=resource.spec.pods_per_group,
        attempt=attempt,
        pods=tuple(pod for pod in pods if pod.attempt == attempt and not is_lost(pod, observed.now)),
        old_pods=tuple(pod for pod in pods if pod.attempt != attempt),
        memory=memory if remembered == attempt else None,
    )


def pod_is_ready(pod: ObservedPod) -> bool:
    """Whether the pod is ready and its ranks serve."""
    serves = pod.rank_phase in (None, SERVING)
    return pod.phase is PodPhase.RUNNING and pod.ready and serves and not pod.deleting


def _was_ready(pod: ObservedPod) -> bool:
    """Whether an unready pod was ready: the kubelet sets the first condition Ready before the containers start."""
    changed, started = pod.ready_changed_at, pod.startup_since
    return changed is not None and started is not None and changed > started


def lost_at(pod: ObservedPod) -> float | None:
    """When a pod that is being deleted counts as lost with its node; None for other pods."""
    return None if pod.deletion_deadline is None else pod.deletion_deadline + LOST_AFTER


def is_lost(pod: ObservedPod, now: float) -> bool:
    """Whether a pod is past the time at which it counts as lost with its node."""
    deadline = lost_at(pod)
    return deadline is not None and deadline <= now


def pods_without_keys(resource: MegatronInference, observed: ObservedState) -> tuple[ObservedPod, ...]:
    """Pods that use the keys of a removed Secret.

    Empty while another owner has a Secret of that name: the operator could not create new keys, so it leaves the pods
    alone.
    """
    if names.keys_child(resource.name) in {*observed.children, *observed.taken}:
        return ()
    return tuple(pod for pod in observed.pods if not pod.finished and not is_lost(pod, observed.now))


def _is_consequence(pod: ObservedPod) -> bool:
    return pod.failure is not None and pod.failure.reason == LOST_RANK


def _end_of(pod: ObservedPod) -> float:
    return pod.finished_at or pod.created_at


def _unexplained(pod: ObservedPod) -> Failure:
    if pod.phase is PodPhase.SUCCEEDED:
        return Failure("Completed", f"{pod.name} ended without an error although it should run", exit_code=0)
    return Failure("PodFailed", f"{pod.name} failed without a reason")


def ended_workloads(pods: Iterable[ObservedPod]) -> list[str]:
    """Kueue's Workloads to delete with their pods, in order of their names.

    Kueue keeps a deleted pod that never had a node until its group has ended, which it then never does, or until the
    Workload is deleted. The Workload goes when the other pods have ended, which use its quota until then.
    """
    kept: set[str] = set()
    used: set[str] = set()
    for pod in pods:
        if pod.workload is not None and not pod.finished:
            (kept if pod.deleting and pod.node is None else used).add(pod.workload)
    return sorted(kept - used)
