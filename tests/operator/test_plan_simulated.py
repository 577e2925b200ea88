"""Plans over random histories: every history settles in the desired state."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from planning_support.resources import resource_object
from planning_support.simulation import SimulatedCluster
from suite_support.repetition import repeated

from megatron_operator.api.parse import parse_resource
from megatron_operator.api.v1alpha1 import Lifecycle, MegatronInference, Phase
from megatron_operator.lifecycle import SETTLED_STATE
from megatron_operator.names import template_hash
from megatron_operator.observed_state import CreatePod, ObservedState, PodPhase, SendSignal
from megatron_operator.plan import plan
from megatron_operator.reconcile import reconcile
from megatron_operator.render import image_of
from megatron_operator.replica_groups import ReplicaGroupState
from megatron_operator.settings import Settings
from megatron_operator.status import as_json, build_status
from megatron_operator.status_inputs import StatusInputs

ROUNDS_TO_SETTLE = 150
ROLLOUTS = st.sampled_from([{}, {"maxUnavailable": 1}, {"maxUnavailable": 2, "maxSurge": 1}, {"maxSurge": 2}])
LIFECYCLES = st.sampled_from([each.value for each in Lifecycle])


class RandomHistory(RuleBasedStateMachine):
    """Rules are events; rounds of the operator are among them, with failing actions or not."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = SimulatedCluster()
        self.obj: dict[str, Any] = resource_object()
        self.last_seen: ObservedState | None = None
        self.pods_per_group = 1
        self.surge = 0
        """Groups beyond the desired number: none, unless the operator had an outdated observation."""

    @initialize(replicas=st.integers(1, 3), lifecycle=LIFECYCLES, pods_per_group=st.integers(1, 2), rollout=ROLLOUTS)
    def someone_applies_a_resource(
        self, replicas: int, lifecycle: str, pods_per_group: int, rollout: dict[str, int]
    ) -> None:
        self.pods_per_group = pods_per_group
        policy = {"maxRestarts": 2, "startupTimeout": "300s"}
        spread = {"tensor": pods_per_group}
        self.obj = resource_object(replicas=replicas, lifecycle=lifecycle, failurePolicy=policy, parallelism=spread)
        self.obj["spec"]["rollout"] = rollout

    # --- the operator

    @rule()
    def the_operator_does_a_round(self) -> None:
        self._round(self.cluster.observed(), lost=frozenset(), repeated=frozenset(), order=0)

    @rule(lost=st.frozensets(st.integers(0, 9)), repeated=st.frozensets(st.integers(0, 9)), order=st.randoms())
    def a_round_is_carried_out_in_part_twice_and_in_disorder(
        self, lost: frozenset[int], repeated: frozenset[int], order: Any
    ) -> None:
        self._round(self.cluster.observed(), lost=lost, repeated=repeated, order=order)

    @precondition(lambda self: self.last_seen is not None)
    @rule()
    def a_round_sees_the_pods_as_they_were_before(self) -> None:
        now = self.cluster.observed()
        assert self.last_seen is not None
        self.surge = 1
        stale = ObservedState(
            now=now.now, pods=self.last_seen.pods, engine=now.engine, children=self.last_seen.children
        )
        self._round(stale, lost=frozenset(), repeated=frozenset(), order=0)

    @rule()
    def the_operator_restarts_without_a_status(self) -> None:
        self.obj["status"] = {}
        self.last_seen = None  # It lists the pods again.

    def _round(self, observed: ObservedState, lost: frozenset[int], repeated: frozenset[int], order: Any) -> None:
        resource = self._resource()
        actions = list(enumerate(plan(resource, observed).actions))
        if order:
            order.shuffle(actions)
        for position, action in actions:
            for _ in range(position not in lost) if position not in repeated else range(2):
                self._carry_out(resource, observed, action)
        self.obj["status"] = as_json(build_status(resource, observed))
        self.last_seen = observed

    def _carry_out(self, resource: MegatronInference, observed: ObservedState, action: Any) -> None:
        if isinstance(action, CreatePod):
            assert not resource.deleting, "a pod was created for a resource that is being deleted"
            assert resource.spec.lifecycle is not Lifecycle.STOPPED
        if isinstance(action, SendSignal):
            assert observed.engine is not None
            assert observed.engine.reachable, "a signal was sent to an engine that nobody could see"
            now = (self.cluster.engine_state, self.cluster.auto_suspended)
            if now != (observed.engine.state, observed.engine.auto_suspended):
                return  # The second of two equal signals: the engine has accepted the first, and answers 409.
        self.cluster.carry_out(action)

    # --- the cluster

    @rule(choice=st.integers(0, 99))
    def a_pod_gets_on(self, choice: int) -> None:
        if name := self._pick(choice):
            self.cluster.start(name)

    @rule()
    def all_pods_get_on(self) -> None:
        self.cluster.run_up()

    @rule(choice=st.integers(0, 99), exit_code=st.sampled_from([1, 1, 137, 2, 0]))
    def a_pod_ends(self, choice: int, exit_code: int) -> None:
        name = self._pick(choice)
        if name and self.cluster.pods[name].phase is PodPhase.RUNNING:
            self.cluster.fail(name, exit_code)

    @rule(choice=st.integers(0, 99), at_once=st.booleans())
    def someone_deletes_a_pod(self, choice: int, at_once: bool) -> None:
        if name := self._pick(choice):
            if at_once:
                self.cluster.remove(name)
            else:
                self.cluster.delete(name)

    @rule(choice=st.integers(0, 99), at_once=st.booleans())
    def the_cluster_ends_a_pod(self, choice: int, at_once: bool) -> None:
        name = self._pick(choice)
        if name and self.cluster.pods[name].phase is PodPhase.RUNNING:
            (self.cluster.preempt if at_once else self.cluster.evict)(name)

    @rule(choice=st.integers(0, 99))
    def someone_deletes_a_child(self, choice: int) -> None:
        if self.cluster.children:
            children = sorted(self.cluster.children)
            self.cluster.children.pop(children[choice % len(children)])

    @rule()
    def the_engine_gets_on(self) -> None:
        self.cluster.advance_engine()

    @rule()
    def nobody_asks_for_a_while(self) -> None:
        self.cluster.fall_asleep()

    @rule()
    def a_request_comes(self) -> None:
        self.cluster.wake()

    @rule(reachable=st.booleans())
    def the_leader_is_cut_off_or_back(self, reachable: bool) -> None:
        self.cluster.reachable = reachable

    @rule(choice=st.integers(0, 99))
    def a_pod_stands_still_or_goes_on(self, choice: int) -> None:
        if name := self._pick(choice):
            if name in self.cluster.still:
                self.cluster.go_on(name)
            else:
                self.cluster.stand_still(name)

    @rule(seconds=st.sampled_from([1, 12, 45, 400]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.now += seconds

    # --- users

    @rule(replicas=st.integers(1, 4))
    def someone_scales(self, replicas: int) -> None:
        self._edit(replicas=replicas)

    @rule(lifecycle=LIFECYCLES)
    def someone_changes_the_lifecycle(self, lifecycle: str) -> None:
        self._edit(lifecycle=lifecycle)

    @rule(restart=st.sampled_from(["a", "b"]))
    def someone_asks_for_a_restart(self, restart: str) -> None:
        self._edit(restart={"id": restart})

    @rule(confirmed=st.sampled_from([False, False, False, True]))
    def someone_deletes_the_resource(self, confirmed: bool) -> None:
        if confirmed:
            self.obj["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"

    def _edit(self, **fields: Any) -> None:
        self.obj["spec"] = {**self.obj["spec"], **fields}
        self.obj["metadata"]["generation"] += 1

    # --- invariants

    @invariant()
    def no_forbidden_signal_was_sent(self) -> None:
        assert self.cluster.refused == []

    @invariant()
    def no_more_pods_run_than_are_wished(self) -> None:
        desired = self.obj["spec"].get("replicas", 1)
        live = [len(self.cluster.live(group)) for group in range(desired)]
        assert max(live) <= self.pods_per_group * (1 + self.surge)
        assert sum(live) <= self.pods_per_group * (desired + self.surge)

    @invariant()
    def no_two_pods_are_selected_as_leaders(self) -> None:
        assert len(self.cluster.selected()) <= 1 + self.surge

    def teardown(self) -> None:
        """From here on nothing fails."""
        self.cluster.reachable = True
        self.cluster.still.clear()
        for _ in range(ROUNDS_TO_SETTLE):
            self._round(self.cluster.observed(), lost=frozenset(), repeated=frozenset(), order=0)
            if not plan(self._resource(), self.cluster.observed()).actions and self._has_arrived():
                break
            self.cluster.start_all()
            self.cluster.advance_engine()
            self.cluster.now += 20
        self._is_settled()

    def _exactly_one_leads(self) -> None:
        selected = self.cluster.selected()
        if any(pod.index == 0 and pod.ready for pod in self.cluster.live()):
            assert [pod.name for pod in selected] == [pod.name for pod in self.cluster.coordinators()]
            assert len(selected) == 1
            assert selected[0].known_epoch == selected[0].epoch

    def _has_arrived(self) -> bool:
        progress = {each["type"]: each["status"] for each in self.obj["status"]["conditions"]}
        leaving = [pod for pod in self.cluster.pods.values() if pod.deleting]
        return progress["Progressing"] == "False" and not leaving

    def _is_settled(self) -> None:
        resource, observed = self._resource(), self.cluster.observed()
        assert plan(resource, observed).actions == ()
        if resource.deleting or resource.spec.lifecycle is Lifecycle.STOPPED:
            assert observed.pods == ()
            assert resource.deleting or resource.status.phase is Phase.STOPPED
            return
        hash_now = template_hash(resource, image_of(resource, Settings()))
        inputs = StatusInputs(resource, observed, hash_now)
        assert inputs.surplus_groups == ()
        for view in inputs.groups:
            assert view.given_up or view.state is ReplicaGroupState.READY
            assert view.group.template_hash == hash_now or any(view.given_up for view in inputs.groups)
            assert view.group.old_pods == ()
        self._exactly_one_leads()
        if inputs.accepts_requests and not inputs.is_auto_suspended:
            assert inputs.engine_state is SETTLED_STATE[resource.spec.lifecycle]
        assert self._has_arrived()

    def _resource(self) -> MegatronInference:
        return parse_resource(self.obj)

    def _pick(self, choice: int) -> str | None:
        names = sorted(self.cluster.pods)
        return names[choice % len(names)] if names else None


RandomHistory.TestCase.settings = settings(
    max_examples=repeated(100, 300),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.repetition
class TestThePlanSettlesWhateverHappens(RandomHistory.TestCase):  # type: ignore[misc]
    """Hypothesis searches for a history that ends elsewhere."""


@pytest.mark.parametrize("lifecycle", list(Lifecycle))
def test_an_undisturbed_resource_settles_in_its_desired_state(lifecycle: Lifecycle) -> None:
    cluster, obj = SimulatedCluster(), resource_object(replicas=3, lifecycle=lifecycle.value)
    for _ in range(10):
        result = asyncio.run(reconcile(obj, cluster))
        obj["status"] = as_json(result.status)
        cluster.start_all()
        cluster.advance_engine()
    assert result.patch == {}
    assert result.events == ()
    assert result.status.phase == lifecycle.value
    assert len(cluster.pods) == (0 if lifecycle is Lifecycle.STOPPED else 3)
