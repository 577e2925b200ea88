"""Leader selection: which replica group's first pod runs the coordinator, and the steps that move the role.

The coordinator's Service selects the pod with the leader label. The label decides; the operator then notifies the pod's
launcher. Each decision has a number, the epoch, and a launcher rejects an epoch older than the last one it received. At
most one pod has the label at any time: the operator removes it from one pod before it sets it on another. The previous
leader runs until its successor has the role, so that a planned move has no gap. A previous leader that was unreachable
is notified when it answers again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_operator.api.v1alpha1 import Lifecycle, MegatronInference
from megatron_operator.observed_state import Action, ObservedPod, ObservedState, PodPhase, SendRole, SetRoleLabel
from megatron_operator.replica_groups import SERVING, ReplicaGroup, ReplicaGroupState, is_lost, pod_is_ready

FAILOVER_DELAY = 4.0
"""Seconds without an answer from the leader before another pod takes over.

A leader that answers keeps its coordinator alive, or learns its role, whatever its ranks do. A leader whose coordinator
still has engines of other pods registered keeps the role, because those engines would not leave it.
"""
RECHECK_INTERVAL = 1.0
"""Seconds before the operator checks again whether engines are still registered."""
LOADED = ("Registering", SERVING)
"""Phases of ranks that have loaded their model. Without a coordinator they stay in the first."""


def current_leader(pods: Iterable[ObservedPod]) -> ObservedPod | None:
    """The pod with the leader label. A stale list may show several; then the one with the highest epoch."""
    labelled = [pod for pod in pods if pod.leader and not pod.finished]
    return max(labelled, key=lambda pod: (pod.epoch, pod.attempt, -pod.group), default=None)


def running_leader(observed: ObservedState) -> ObservedPod | None:
    """The leader pod while it runs and is not being deleted."""
    pod = current_leader(observed.pods)
    return pod if pod is not None and pod.phase is PodPhase.RUNNING and not pod.deleting else None


def leading_group(resource: MegatronInference, observed: ObservedState, count: int | None = None) -> int:
    """Index of the group whose first pod is the leader, or was the last leader if that group still exists.

    ``count`` is the number of groups, by default that of the desired ones.
    """
    leader, before = current_leader(observed.pods), resource.status.leader
    known = [leader.group] if leader is not None else []
    known += [before.replica_group] if before is not None else []
    return next((group for group in known if group < (count or resource.spec.replicas)), 0)


def next_epoch(resource: MegatronInference, observed: ObservedState) -> int:
    """The epoch of the next decision: greater than any epoch in use."""
    before = resource.status.leader
    heard = [pod.epoch for pod in observed.pods] + [pod.known_epoch for pod in observed.pods]
    return 1 + max([0 if before is None else before.epoch, *heard])


@dataclass(frozen=True)
class LeaderSelection:
    """The leader role as observed, and the steps that move it.

    Args:
        states: States of ``groups``, in the same order.
        rolling: The groups that the rollout replaces now.
    """

    resource: MegatronInference
    observed: ObservedState
    groups: Sequence[ReplicaGroup]
    states: Sequence[ReplicaGroupState]
    template_hash: str
    rolling: Sequence[ReplicaGroup] = ()

    @property
    def leader(self) -> ObservedPod | None:
        """The pod with the leader label."""
        return current_leader(self.observed.pods)

    @property
    def initial_leader_group(self) -> int | None:
        """The group whose next first pod starts as the leader; None while a leader or a successor exists."""
        if self.leader is not None or self._successor() is not None:
            return None
        return leading_group(self.resource, self.observed)

    def steps(self) -> Iterator[Action]:
        """The next actions. Each plan decides anew from the observed state."""
        leader, extra = self.leader, self._extra_leaders()
        yield from (SetRoleLabel(pod.name, pod.uid, leader=False) for pod in extra)
        if any(not pod.finished for pod in extra):
            return
        if leader is None:
            yield from self._promote(self._successor())
        elif is_lost(leader, self.observed.now) or (self._successor() is not None and self._must_hand_over(leader)):
            yield SetRoleLabel(leader.name, leader.uid, leader=False)
        else:
            yield from self._notify(leader)

    def is_needed(self, group: int) -> bool:
        """Whether a group to be removed still has to serve until another group has the leader."""
        pods = [pod for pod in self.observed.pods if pod.group == group and (pod.leader or pod.reports_leader)]
        leader = self.leader
        if not any(_is_running(pod) for pod in pods):
            return False
        is_elsewhere = leader is not None and leader.group != group and not leader.deleting
        return is_elsewhere or self._successor() is not None

    def failover_time(self) -> float | None:
        """When an unreachable leader may lose the role; None for a leader that answers, or without a successor."""
        leader = self.leader
        if leader is None or leader.unreachable_since is None or self._successor() is None:
            return None
        at = leader.unreachable_since + FAILOVER_DELAY
        return at if at > self.observed.now else self.observed.now + RECHECK_INTERVAL

    def _extra_leaders(self) -> list[ObservedPod]:
        """Pods that have the leader label besides the leader."""
        return [pod for pod in self.observed.pods if pod.leader and self.leader not in (None, pod)]

    def _promote(self, pod: ObservedPod | None) -> Iterator[Action]:
        if pod is not None:
            yield SetRoleLabel(pod.name, pod.uid, leader=True, epoch=next_epoch(self.resource, self.observed))

    def _notify(self, leader: ObservedPod) -> Iterator[Action]:
        """Notify pods that do not have the decision yet. The operator retries those that do not answer."""
        lifecycle = self.resource.spec.lifecycle
        if leader.deleting or leader.address is None or leader.reports_leader is None or lifecycle is Lifecycle.STOPPED:
            return
        if not leader.reports_leader and leader.known_epoch >= leader.epoch:
            yield from self._promote(
                leader
            )  # The launcher has a newer epoch than the label, so the decision needs a new number.
            return
        if leader.known_epoch < leader.epoch:
            yield SendRole(leader.address, leader=True, epoch=leader.epoch, lifecycle=lifecycle)
            return
        for pod in self.observed.pods:
            if pod.reports_leader and pod != leader and pod.address is not None:
                yield SendRole(pod.address, leader=False, epoch=max(leader.epoch, pod.known_epoch), lifecycle=lifecycle)

    def _must_hand_over(self, leader: ObservedPod) -> bool:
        if self._is_to_be_removed(leader) or leader.deleting:
            return True
        group = self.groups[leader.group]
        if leader.attempt != group.attempt or self.states[leader.group] in (
            ReplicaGroupState.FAILED,
            ReplicaGroupState.LEAVING,
        ):
            return True
        return self._is_cut_off(leader)

    def _is_cut_off(self, leader: ObservedPod) -> bool:
        """Whether no engine is registered with an unreachable leader. While another pod also acts as leader, engines
        may be registered there."""
        if leader.unreachable_since is None or self.observed.now < leader.unreachable_since + FAILOVER_DELAY:
            return False
        others = [pod for pod in self.observed.pods if pod != leader]
        return not any(pod.registered for pod in others) or any(pod.reports_leader for pod in others)

    def _is_to_be_removed(self, leader: ObservedPod) -> bool:
        is_surplus = leader.group >= len(self.groups)
        return is_surplus or leader.group in [group.index for group in self.rolling]

    def _successor(self) -> ObservedPod | None:
        """The next leader. A healthy leader gives way only to a pod that is ready."""
        leader = self.leader
        leader_is_healthy = (
            leader is not None and _is_running(leader) and leader.ready and leader.unreachable_since is None
        )
        able = [
            (group, pod)
            for group, state in zip(self.groups, self.states, strict=True)
            if (pod := group.first_pod) is not None
            and pod != leader
            and group not in self.rolling
            and state not in (ReplicaGroupState.FAILED, ReplicaGroupState.LEAVING)
            and _is_running(pod)
            and (pod_is_ready(pod) if leader_is_healthy else pod.rank_phase in LOADED)
        ]
        best = min(able, key=lambda each: (not each[1].ready, self._is_outdated(each[0]), each[0].index), default=None)
        return None if best is None else best[1]

    def _is_outdated(self, group: ReplicaGroup) -> bool:
        return group.template_hash != self.template_hash


def _is_running(pod: ObservedPod) -> bool:
    return pod.phase is PodPhase.RUNNING and not pod.deleting and pod.address is not None
