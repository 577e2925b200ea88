"""Replacement: which replica groups are replaced now, and how many further groups run meanwhile.

A group is replaced because of its template (a rollout), or because its node is cordoned. A pure function of the
observed state, as the plan is. A rollout never brings the number of ready groups below
``replicas - maxUnavailable``. A group with the previous template that served and is not ready at the moment may become
ready again, so replacing it takes from the same budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_operator.api.v1alpha1 import Device, MegatronInference
from megatron_operator.node_drain import NodeDrain
from megatron_operator.observed_state import ObservedState
from megatron_operator.replica_groups import (
    SCHEDULING_GATED,
    UNSCHEDULABLE,
    ReplicaGroup,
    ReplicaGroupState,
    observe_replica_groups,
)
from megatron_operator.restarts import GiveUp, restart_decision
from megatron_operator.settings import Settings


@dataclass(frozen=True)
class RolloutBudget:
    """Replica groups that may be missing, and groups that may run beyond ``spec.replicas``, for reasons of rollout."""

    max_unavailable: int
    max_surge: int


IN_PLACE = RolloutBudget(max_unavailable=1, max_surge=0)


def rollout_budget(resource: MegatronInference, settings: Settings) -> RolloutBudget:
    """The budget of the spec. A field that is left out follows from the other one.

    Without both, a group on CPUs gets a spare group first. Groups on GPUs, and on a single machine, are replaced in
    place: a spare one may never find room there.
    """
    rollout = resource.spec.rollout
    unavailable, surge = rollout.max_unavailable, rollout.max_surge
    if unavailable is None and surge is None:
        surge = 1 if settings.has_spare_nodes and resource.spec.pods.device is Device.CPU else 0
    if surge is None:
        surge = 0 if unavailable else 1
    if unavailable is None:
        unavailable = 0 if surge else 1
    return RolloutBudget(unavailable, surge)


@dataclass(frozen=True)
class Rollout:
    """The rollout of a template over the observed groups, and their way from cordoned nodes."""

    resource: MegatronInference
    observed: ObservedState
    template_hash: str
    budget: RolloutBudget

    @property
    def drain(self) -> NodeDrain:
        """The cordoned nodes."""
        return NodeDrain(self.resource, self.observed)

    def groups(self) -> tuple[ReplicaGroup, ...]:
        """The desired groups, and behind them those of the surge."""
        return observe_replica_groups(self.resource, self.observed, self.resource.spec.replicas + self.surge())

    def surge(self) -> int:
        """Groups to run beyond ``spec.replicas`` now: while a group that serves waits for its replacement, and until
        all desired groups are ready. One that has found no node is of no use when no group waits for it any more."""
        replicas, most = self.resource.spec.replicas, self.budget.max_surge
        most = max(1, most) if self.drain.is_honored else most
        groups = observe_replica_groups(self.resource, self.observed, replicas + most)
        desired, spare = groups[:replicas], groups[replicas:]
        if all(self._is_settled(group) for group in desired):
            return 0
        serving = [group for group in desired if self._serves(group)]
        outdated = 0 if self.resource.spec.rollout.paused else sum(self.is_outdated(group) for group in serving)
        leaving = sum(bool(self.drain.nodes(group)) for group in serving)
        wanted = max(min(self.budget.max_surge, outdated), min(most, leaving))
        present = [group.index - replicas + 1 for group in spare if group.is_scheduled]
        return max(wanted, *present, 0)

    def replaced(self, groups: Sequence[ReplicaGroup], leading: int) -> tuple[ReplicaGroup, ...]:
        """The groups to delete now, because of their template or their node: those that never served, and others within
        the budget.

        The group with the index ``leading`` comes last.
        """
        outdated = () if self.resource.spec.rollout.paused else self._outdated(groups, leading)
        return (*outdated, *self._drained([group for group in groups if group not in outdated], leading))

    def _outdated(self, groups: Sequence[ReplicaGroup], leading: int) -> tuple[ReplicaGroup, ...]:
        outdated = [group for group in groups if self.is_outdated(group)]
        idle = [group for group in outdated if self._is_idle(group)]
        if self.stalled(groups):
            return tuple(idle)
        least = self.resource.spec.replicas - self.budget.max_unavailable
        return (*idle, *self._spared(outdated, groups, least, leading))

    def _drained(self, groups: Sequence[ReplicaGroup], leading: int) -> tuple[ReplicaGroup, ...]:
        """The groups that leave cordoned nodes now. One that serves needs a ready group in its place, unless there is
        no room for one; a group that failed is missing anyway."""
        leaving = [group for group in groups if self.drain.nodes(group)]
        idle = [group for group in leaving if self._is_idle(group)]
        if self.drain.has_no_room(groups):
            return (*idle, *(group for group in leaving if self._serves(group)))
        replicas = self.resource.spec.replicas
        failed = sum(self._state(group) is ReplicaGroupState.FAILED for group in groups if group.index < replicas)
        return (*idle, *self._spared(leaving, groups, replicas - failed, leading))

    def _spared(
        self, candidates: Sequence[ReplicaGroup], groups: Sequence[ReplicaGroup], least: int, leading: int
    ) -> list[ReplicaGroup]:
        """Those of the candidates that serve and without which at least this number of ``groups`` is ready."""
        ready = sum(self._is_ready(group) for group in groups)
        serving = [group for group in candidates if self._serves(group)]
        chosen: list[ReplicaGroup] = []
        # A group that is not ready at the moment is missing already.
        for group in sorted(serving, key=lambda group: (self._is_ready(group), group.index == leading, -group.index)):
            ready -= self._is_ready(group)
            if ready < least:
                break
            chosen.append(group)
        return chosen

    def stalled(self, groups: Sequence[ReplicaGroup]) -> tuple[ReplicaGroup, ...]:
        """The groups with the new template that fail or cannot start, while others still run the previous one."""
        if not any(self.is_outdated(group) and group.live_pods for group in groups):
            return ()
        return tuple(group for group in groups if group.template_hash == self.template_hash and self._fails(group))

    def is_outdated(self, group: ReplicaGroup) -> bool:
        """Whether the rollout is to replace the group; never for one below ``spec.rollout.partition``."""
        return group.template_hash != self.template_hash and group.index >= self.resource.spec.rollout.partition

    def _fails(self, group: ReplicaGroup) -> bool:
        if self._is_ready(group):
            return False
        waits = [pod.waiting.reason for pod in group.live_pods if pod.waiting is not None]
        cannot_start = any(reason not in (UNSCHEDULABLE, SCHEDULING_GATED) for reason in waits)
        has_failed = group.restarts > 0 or group.recorded_failure is not None
        return cannot_start or has_failed or self._state(group) is ReplicaGroupState.FAILED

    def _is_idle(self, group: ReplicaGroup) -> bool:
        """Whether the group starts and never served."""
        return self._state(group) is ReplicaGroupState.STARTING and not group.has_served

    def _serves(self, group: ReplicaGroup) -> bool:
        """Whether the group is ready, or was and may become ready again."""
        state = self._state(group)
        return state is ReplicaGroupState.READY or (state is ReplicaGroupState.STARTING and group.has_served)

    def _is_settled(self, group: ReplicaGroup) -> bool:
        """Whether a group needs no spare one: it is ready and stays, or nothing will make it ready."""
        if self._is_ready(group):
            stays = self.resource.spec.rollout.paused or not self.is_outdated(group)
            return stays and not self.drain.nodes(group)
        failed = group.failure(self.resource.spec.failure_policy, self.observed.now)
        if failed is None:
            return False
        decision = restart_decision(group, failed, self.resource.spec.failure_policy, self.template_hash)
        return isinstance(decision, GiveUp)

    def _is_ready(self, group: ReplicaGroup) -> bool:
        return self._state(group) is ReplicaGroupState.READY

    def _state(self, group: ReplicaGroup) -> ReplicaGroupState:
        return group.state(self.resource.spec.failure_policy, self.observed.now)
