"""The next actions, as a pure function of the resource and the observed state: no clock, no client, no memory.

The operator computes a plan anew after each observation. A plan that was carried out in part, twice or not at all leads
to the same end state as one that was carried out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_operator import kueue, names
from megatron_operator.api.v1alpha1 import Lifecycle, MegatronInference
from megatron_operator.idle_stop import IdleStop
from megatron_operator.leader_selection import LeaderSelection, leading_group, next_epoch, running_leader
from megatron_operator.lifecycle import next_signal
from megatron_operator.model_cache import ModelCache
from megatron_operator.names import PodIdentity
from megatron_operator.observed_state import (
    Action,
    AdoptPod,
    ApplyChild,
    CreatePod,
    DeleteChild,
    DeletePod,
    ObservedPod,
    ObservedState,
    SendSignal,
)
from megatron_operator.render import (
    disruption_budget,
    gang_kind,
    gang_object,
    grace_seconds,
    image_of,
    keys_secret,
    owner_reference,
    render_children,
    render_pod,
)
from megatron_operator.replica_groups import (
    STARTUP_TIMEOUT,
    ReplicaGroup,
    ReplicaGroupState,
    ended_workloads,
    lost_at,
    pods_without_keys,
)
from megatron_operator.restarts import GiveUp, Retry, restart_decision
from megatron_operator.rollout import Rollout, rollout_budget
from megatron_operator.settings import Settings

MAX_CREATIONS = 32
"""Pods that one plan creates at most. The next plan follows at once, after the rounds of other resources."""


@dataclass(frozen=True)
class Plan:
    """Actions in the order to carry them out. After ``requeue_after`` seconds, time alone may require another plan."""

    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None


def plan(resource: MegatronInference, observed: ObservedState, settings: Settings | None = None) -> Plan:
    """The next step towards the desired state. Raises InvalidResource when the pod template is not a valid pod."""
    return _Planner(resource, observed, settings or Settings()).plan()


class _Planner:
    """State that the steps of one plan share."""

    def __init__(self, resource: MegatronInference, observed: ObservedState, settings: Settings) -> None:
        self.resource = resource
        self.observed = observed
        self.settings = settings
        self.policy = resource.spec.failure_policy
        self.template_hash = names.template_hash(resource, image_of(resource, settings))
        rollout = Rollout(resource, observed, self.template_hash, rollout_budget(resource, settings))
        self.drain = rollout.drain
        self.groups = rollout.groups()
        self.states = tuple(group.state(self.policy, observed.now) for group in self.groups)
        self.rolling = rollout.replaced(self.groups, leading_group(resource, observed))
        self.leader_selection = LeaderSelection(
            resource, observed, self.groups, self.states, self.template_hash, self.rolling
        )
        self.idle_stop = IdleStop(resource, observed, settings.has_activator)
        self.is_stopped = resource.spec.lifecycle is Lifecycle.STOPPED or self.idle_stop.is_stopped
        self.cache = ModelCache(resource, observed, settings)
        self.deadlines: list[float] = []
        self.creations = 0
        self.gang_kind = gang_kind(resource, observed.gang_kinds)
        self.attempts = {names.attempt_name(resource.name, pod.group, pod.attempt) for pod in observed.pods}
        """Attempts whose gang objects are needed."""

    def plan(self) -> Plan:
        if self.resource.leaves_children:
            actions: list[Action] = []
        elif self.resource.deleting:
            actions = [*self._delete_all(self.observed.pods)]
        elif self.observed.orphans:
            actions = [*self._adopt()]
        elif self.is_stopped:
            actions = [*self._children(), *self._delete_all(self.observed.pods), *self._unused_gangs()]
        elif pods := pods_without_keys(self.resource, self.observed):
            actions = [*self._follow_loss_of_keys(pods)]
        else:
            steps = (
                self._children(),
                self._roles(),
                self._surplus(),
                self._wished(),
                self._signal(),
                self._unused_gangs(),
            )
            actions = [action for step in steps for action in step]
            self._expect_room()
            if (due := self.idle_stop.due_at) is not None:
                self.deadlines.append(due)
        ended = (DeleteChild(kueue.WORKLOAD, name) for name in ended_workloads(self.observed.pods))
        return Plan((*actions, *ended), self._requeue_after())

    def _requeue_after(self) -> float | None:
        return max(0.0, min(self.deadlines) - self.observed.now) if self.deadlines else None

    # --- what a deleted resource of the same name left behind

    def _adopt(self) -> Iterator[Action]:
        """Own the pods, and objects that they need, before any other decision."""
        yield from self._children()
        for group, attempt in sorted({(pod.group, pod.attempt) for pod in self.observed.orphans}):
            yield from self._gang(group, attempt)
        owner = owner_reference(self.resource)
        yield from (AdoptPod(pod.name, pod.uid, owner) for pod in self.observed.orphans)
        self.deadlines.append(self.observed.now)

    # --- children besides pods

    def _children(self) -> Iterator[Action]:
        secret = keys_secret(self.resource)
        if names.keys_child(self.resource.name) not in self.observed.children:
            yield secret
        rendered = [*render_children(self.resource, self.settings), *self._budgets()]
        desired = {names.child_key(manifest): manifest for manifest in rendered}
        for key, manifest in desired.items():
            if self.observed.children.get(key) != names.applied_hash(manifest["metadata"]):
                yield ApplyChild(manifest)
        for key in sorted(self.observed.children.keys() - desired.keys() - {names.keys_child(self.resource.name)}):
            kind, name = key.split("/")
            if kind not in (*names.GANG_KINDS, *names.CACHE_KINDS):
                yield DeleteChild(kind, name)
        yield from self.cache.steps()
        if (at := self.cache.retry_at) is not None:
            self.deadlines.append(at)

    def _budgets(self) -> Iterator[dict[str, Any]]:
        """The budget, while there should be pods. Evictions are refused by default only if the operator moves groups
        from cordoned nodes, because nothing else would let a drain continue."""
        kind = self.observed.budget_kind
        if self.settings.disruption_budgets and kind is not None and not self.is_stopped:
            yield disruption_budget(self.resource, kind, default_unavailable=0 if self.drain.is_honored else 1)

    def _gang(self, group: int, attempt: int) -> Iterator[Action]:
        """The gang object of an attempt exists before its pods."""
        self.attempts.add(names.attempt_name(self.resource.name, group, attempt))
        if self.gang_kind is None:
            return
        manifest = gang_object(self.resource, self.gang_kind, group, attempt)
        if names.child_key(manifest) not in self.observed.children:
            yield ApplyChild(manifest)

    def _unused_gangs(self) -> Iterator[Action]:
        """Gang objects stay as long as their attempt has a pod."""
        for key in sorted(self.observed.children):
            kind, name = key.split("/")
            if kind in names.GANG_KINDS and name not in self.attempts:
                yield DeleteChild(kind, name)

    # --- who leads

    def _roles(self) -> Iterator[Action]:
        yield from self.leader_selection.steps()
        if (at := self.leader_selection.failover_time()) is not None:
            self.deadlines.append(at)

    # --- pods that have to go

    def _delete_all(self, pods: Sequence[ObservedPod]) -> Iterator[Action]:
        for pod in sorted(pods, key=lambda pod: (-pod.group, -pod.attempt, -pod.index)):
            if not pod.deleting:
                yield DeletePod(pod.name, pod.uid, 0 if pod.finished else grace_seconds(self.resource))

    def _follow_loss_of_keys(self, pods: Sequence[ObservedPod]) -> Iterator[Action]:
        """Pods with different keys cannot communicate, so all pods end before the operator makes new keys."""
        yield from self._delete_all(pods)
        self.deadlines += [at for pod in pods if (at := lost_at(pod)) is not None]

    def _surplus(self) -> Iterator[Action]:
        count = len(self.groups)
        surplus = [
            pod for pod in self.observed.pods if pod.group >= count and not self.leader_selection.is_needed(pod.group)
        ]
        old = [pod for group in self.groups for pod in group.old_pods]
        yield from self._delete_all([*surplus, *old])

    # --- groups that should be there

    def _wished(self) -> Iterator[Action]:
        for group, state in zip(self.groups, self.states, strict=True):
            match state:
                case ReplicaGroupState.ABSENT:
                    yield from self._follow_absence(group)
                case ReplicaGroupState.LEAVING:
                    yield from self._follow_leaving(group)
                case ReplicaGroupState.FAILED:
                    yield from self._follow_failure(group)
                case ReplicaGroupState.STARTING:
                    yield from self._follow_start(group)
                case ReplicaGroupState.READY:
                    yield from self._follow_replacement(group)

    def _follow_absence(self, group: ReplicaGroup) -> Iterator[Action]:
        restarts = group.restarts if group.template_hash == self.template_hash else 0
        yield from self._create(group, group.next_attempt, restarts, range(group.size))

    def _follow_start(self, group: ReplicaGroup) -> Iterator[Action]:
        assert group.attempt is not None
        if group.template_hash != self.template_hash or group in self.rolling:
            yield from self._follow_replacement(group)
            return
        yield from self._create(group, group.attempt, group.restarts, group.missing)
        deadlines = (group.startup_deadline(self.policy), group.gang_deadline(self.policy))
        self.deadlines += [deadline for deadline in deadlines if deadline is not None]

    def _follow_leaving(self, group: ReplicaGroup) -> Iterator[Action]:
        """Delete the rest of the attempt. The next one starts when all its pods are gone, or lost with their node."""
        yield from self._delete_all(group.pods)
        self.deadlines += [at for pod in group.pods if (at := lost_at(pod)) is not None]

    def _follow_failure(self, group: ReplicaGroup) -> Iterator[Action]:
        """Delete the running pods of the attempt. Failed pods stay for inspection until the next attempt exists."""
        failed = group.failure(self.policy, self.observed.now)
        assert failed is not None
        decision = restart_decision(group, failed, self.policy, self.template_hash)
        match decision:
            case GiveUp() if failed.failure.reason == STARTUP_TIMEOUT:
                return  # The pods may still become ready, and nothing would replace them.
            case Retry(at=at) if at > self.observed.now:
                self.deadlines.append(at)
            case Retry(restarts=restarts) if not group.live_pods:
                yield from self._create(group, group.next_attempt, restarts, range(group.size))
        yield from self._delete_all(group.live_pods)

    def _create(self, group: ReplicaGroup, attempt: int, restarts: int, indices: Sequence[int]) -> Iterator[Action]:
        if not self.cache.is_filled:
            return
        if indices:
            yield from self._gang(group.index, attempt)
        nodes = self.cache.filled_nodes
        for index in indices:
            if self.creations == MAX_CREATIONS:
                self.deadlines.append(self.observed.now)
                return
            self.creations += 1
            leads = index == 0 and group.index == self.leader_selection.initial_leader_group
            epoch = next_epoch(self.resource, self.observed) if leads else 0
            identity = PodIdentity(group.index, attempt, index, leads, self.template_hash, restarts, epoch)
            yield CreatePod(render_pod(self.resource, identity, self.settings, self.gang_kind, nodes))

    def _follow_replacement(self, group: ReplicaGroup) -> Iterator[Action]:
        """Replace the group if its turn has come. One that served stays until another group has the leader."""
        is_needed = group.has_served and self.leader_selection.is_needed(group.index)
        if group in self.rolling and not is_needed and self.cache.is_filled:
            yield from self._delete_all(group.pods)
        elif (deadline := group.startup_deadline(self.policy)) is not None:
            self.deadlines.append(deadline)

    def _expect_room(self) -> None:
        """Time alone shows that no node has room for the successor of a group on a cordoned node."""
        deadline = self.drain.scheduling_deadline(self.groups)
        if deadline is not None and any(self.drain.nodes(group) for group in self.groups):
            self.deadlines.append(deadline)

    # --- the engine

    def _signal(self) -> Iterator[Action]:
        engine, leader = self.observed.engine, running_leader(self.observed)
        if engine is None or not engine.reachable or leader is None or leader.address is None:
            return
        signal = next_signal(self.resource.spec.lifecycle, engine.state, auto_suspended=engine.auto_suspended)
        if signal is not None:
            yield SendSignal(signal, leader.address)
