"""Inputs of the status: the observed state, the desired state, and the values that conditions derive from both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from megatron_operator import names
from megatron_operator.api.v1alpha1 import ConditionType, FailurePolicy, LastFailure, Lifecycle, MegatronInference
from megatron_operator.idle_stop import IdleStop
from megatron_operator.leader_selection import leading_group, running_leader
from megatron_operator.model_cache import ModelCache
from megatron_operator.observed_state import EngineState, ObservedPod, ObservedState
from megatron_operator.replica_groups import (
    ReplicaGroup,
    ReplicaGroupFailure,
    ReplicaGroupState,
    pods_without_keys,
)
from megatron_operator.restarts import GiveUp, Retry, restart_decision
from megatron_operator.rollout import IN_PLACE, Rollout, RolloutBudget
from megatron_operator.settings import Settings
from megatron_operator.timestamps import seconds

ENGINE_UNREACHABLE = "EngineUnreachable"


@dataclass(frozen=True)
class ReplicaGroupView:
    """A desired replica group, its state, and, when it failed, the failure and the restart decision."""

    group: ReplicaGroup
    state: ReplicaGroupState
    failed: ReplicaGroupFailure | None = None
    decision: Retry | GiveUp | None = None

    @property
    def given_up(self) -> GiveUp | None:
        """Set when there will be no further attempt."""
        return self.decision if isinstance(self.decision, GiveUp) else None

    @property
    def is_unrecovered(self) -> bool:
        """Whether it failed and is not ready again."""
        if self.state is ReplicaGroupState.READY:
            return False
        has_failed = self.group.restarts > 0 or self.group.recorded_failure is not None
        return self.state is ReplicaGroupState.FAILED or has_failed


@dataclass(frozen=True)
class StatusInputs:
    """All inputs of a status. ``problems`` are messages about failed actions."""

    resource: MegatronInference
    observed: ObservedState
    template_hash: str
    problems: tuple[str, ...] = ()
    rollout_budget: RolloutBudget = IN_PLACE
    has_activator: bool = False
    settings: Settings = field(default_factory=Settings)

    @cached_property
    def last_failures(self) -> dict[int, LastFailure | None]:
        """The last failure of each replica group in the previous status, by index."""
        return {group.index: group.last_failure for group in self.resource.status.replica_groups}

    @property
    def policy(self) -> FailurePolicy:
        """The failure policy of the resource."""
        return self.resource.spec.failure_policy

    @property
    def desired(self) -> Lifecycle:
        """The desired lifecycle; Stopped for a model that was stopped because it was idle."""
        return Lifecycle.STOPPED if self.idle_stop.is_stopped else self.resource.spec.lifecycle

    @cached_property
    def idle_stop(self) -> IdleStop:
        """The stop of an idle model."""
        return IdleStop(self.resource, self.observed, self.has_activator)

    @cached_property
    def cache(self) -> ModelCache:
        """The model cache."""
        return ModelCache(self.resource, self.observed, self.settings)

    @property
    def should_have_pods(self) -> bool:
        """Whether the resource should have pods."""
        return not self.resource.deleting and self.desired is not Lifecycle.STOPPED

    @property
    def has_http_service(self) -> bool:
        """Whether the Service for clients exists and selects the pods of this resource."""
        return f"Service/{names.http_service(self.resource.name)}" in self.observed.children

    @property
    def taken_services(self) -> tuple[str, ...]:
        """Names of Services that belong to another owner."""
        return tuple(name for name in names.services(self.resource.name) if f"Service/{name}" in self.observed.taken)

    @cached_property
    def rollout(self) -> Rollout:
        """The rollout of the current template."""
        return Rollout(self.resource, self.observed, self.template_hash, self.rollout_budget)

    @cached_property
    def all_groups(self) -> tuple[ReplicaGroupView, ...]:
        """The desired replica groups, by index, and behind them those that run for a rollout."""
        return tuple(self._view(group) for group in self.rollout.groups())

    @property
    def groups(self) -> tuple[ReplicaGroupView, ...]:
        """The desired replica groups, by index."""
        return self.all_groups[: self.resource.spec.replicas]

    @cached_property
    def stalled_groups(self) -> tuple[ReplicaGroupView, ...]:
        """Groups with the new template that fail or cannot start, while others still run the previous one."""
        stalled = self.rollout.stalled([view.group for view in self.all_groups])
        return tuple(view for view in self.all_groups if view.group in stalled)

    @cached_property
    def leaving_nodes(self) -> dict[int, tuple[str, ...]]:
        """Indices of the groups on cordoned nodes, with these nodes."""
        found = {view.group.index: self.rollout.drain.nodes(view.group) for view in self.all_groups}
        return {index: nodes for index, nodes in found.items() if nodes}

    @property
    def has_no_room(self) -> bool:
        """Whether no other node has room for groups on cordoned nodes."""
        return self.rollout.drain.has_no_room([view.group for view in self.all_groups])

    @cached_property
    def leading_group(self) -> ReplicaGroupView:
        """The group whose first pod is the leader, or was last."""
        return self.all_groups[leading_group(self.resource, self.observed, len(self.all_groups))]

    @cached_property
    def ready_groups(self) -> int:
        """Number of desired replica groups whose pods are all ready."""
        return sum(view.state is ReplicaGroupState.READY for view in self.groups)

    @property
    def surplus_groups(self) -> tuple[int, ...]:
        """Indices of groups that still have pods but are no longer desired."""
        return tuple(sorted({pod.group for pod in self.observed.pods if pod.group >= len(self.all_groups)}))

    @cached_property
    def has_no_keys(self) -> bool:
        """Whether pods have to end because the Secret with their keys was removed."""
        return bool(pods_without_keys(self.resource, self.observed))

    @cached_property
    def outdated_groups(self) -> tuple[int, ...]:
        """Indices of desired groups whose pods have another template, whether the rollout reaches them or not."""
        return tuple(view.group.index for view in self.groups if view.group.template_hash != self.template_hash)

    @cached_property
    def unrecovered_groups(self) -> tuple[ReplicaGroupView, ...]:
        """Groups that failed and are not ready again."""
        return tuple(view for view in self.all_groups if view.is_unrecovered)

    @cached_property
    def leader(self) -> ObservedPod | None:
        """The leader pod while it runs."""
        return running_leader(self.observed)

    @property
    def engine_state(self) -> EngineState | None:
        """The engine state that the leader reports; None when it is unknown."""
        engine = self.observed.engine
        return engine.state if engine is not None and engine.reachable and self.leader is not None else None

    @property
    def is_auto_suspended(self) -> bool:
        """Whether the leader suspended the idle engine, or is suspending or resuming it, while Running is desired."""
        engine = self.observed.engine
        is_asleep = self.engine_state is not None and engine is not None and engine.auto_suspended
        return is_asleep and self.desired is Lifecycle.RUNNING

    @cached_property
    def accepts_requests(self) -> bool:
        """Whether the frontend accepts requests and the engine state is known."""
        return self.leader is not None and self.leader.ready and self.engine_state is not None

    @cached_property
    def is_unreachable(self) -> bool:
        """Whether a leader that was up does not answer. A leader that is still starting is not unreachable."""
        engine, leader = self.observed.engine, self.leader
        if leader is None or (engine is not None and engine.reachable):
            return False
        return leader.ready or self._was_up

    @property
    def state_since(self) -> float:
        """Since when the engine has been in its state."""
        status = self.resource.status
        if status.engine_state == self.engine_state and status.engine_state_time is not None:
            return seconds(status.engine_state_time)
        return self.observed.now

    @property
    def _was_up(self) -> bool:
        status, group = self.resource.status, self.leading_group.group
        before = status.condition(ConditionType.READY)
        was_up = status.engine_state is not None or (before is not None and before.reason == ENGINE_UNREACHABLE)
        return was_up and group.memory is not None

    def _view(self, group: ReplicaGroup) -> ReplicaGroupView:
        failed = group.failure(self.policy, self.observed.now)
        decision = restart_decision(group, failed, self.policy, self.template_hash) if failed else None
        return ReplicaGroupView(group, group.state(self.policy, self.observed.now), failed, decision)
