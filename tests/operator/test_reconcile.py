"""Whole rounds: look, decide, act, report."""

from __future__ import annotations

from typing import Any

from planning_support.resources import resource_object
from planning_support.simulation import SimulatedCluster

from megatron_operator.events import Event
from megatron_operator.plan import MAX_CREATIONS
from megatron_operator.reconcile import (
    AFTER_TROUBLE,
    LONGEST_AFTER_TROUBLE,
    MAX_FAILED_CREATIONS,
    ReconcileResult,
    begin,
    reconcile,
    status_patch,
)
from megatron_operator.status import as_json
from megatron_operator.world import (
    Action,
    ActionRefused,
    ApplyChild,
    CreatePod,
    CreateSecret,
    KindMissing,
    NamespaceTerminating,
    World,
    WorldError,
)


class Flaky(SimulatedCluster):
    """Refuses some kinds of actions, and does not let itself be looked at when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses: dict[type, WorldError] = {}
        self.refuses_kinds: dict[str, WorldError] = {}
        """The same for children of some kinds alone."""
        self.blind = False
        self.asked: list[Action] = []
        """All actions, whether refused or not."""

    async def observe(self, name: str, namespace: str) -> World:
        if self.blind:
            raise WorldError("the API server does not answer")
        return await super().observe(name, namespace)

    async def apply(self, name: str, namespace: str, action: Action) -> None:
        self.asked.append(action)
        if type(action) in self.refuses:
            raise self.refuses[type(action)]
        if isinstance(action, ApplyChild) and action.manifest["kind"] in self.refuses_kinds:
            raise self.refuses_kinds[action.manifest["kind"]]
        await super().apply(name, namespace, action)


class Operating:
    """Rounds over one resource, whose status is written as the adapters do it."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = Flaky()
        self.obj = resource_object(**spec)
        self.told: list[Event] = []
        self.failures = 0
        """Rounds that failed, without one between them that did not."""

    async def round(self) -> ReconcileResult:
        result = await reconcile(self.obj, self.cluster, failures=self.failures)
        self.failures = self.failures + 1 if result.failed else 0
        merged = {**self.obj.get("status", {}), **result.patch}
        self.obj["status"] = {field: value for field, value in merged.items() if value is not None}
        assert self.obj["status"] == as_json(result.status)
        self.told += result.events
        return result

    async def settle(self) -> ReconcileResult:
        for _ in range(8):
            await self.round()
            self.cluster.start_all()
            self.cluster.advance_engine()
        return await self.round()

    def edit(self, **fields: Any) -> None:
        self.obj["spec"] = {**self.obj["spec"], **fields}
        self.obj["metadata"]["generation"] += 1

    def reasons(self) -> list[str]:
        """Of the events so far; they are forgotten."""
        reasons, self.told = [event.reason for event in self.told], []
        return reasons


async def test_a_settled_resource_causes_no_writes_no_events_and_no_wake_up() -> None:
    operating = Operating(replicas=2)
    result = await operating.settle()
    assert result.patch == {}
    assert result.events == ()
    assert result.requeue_after is None


async def test_each_transition_is_told_once() -> None:
    operating = Operating()
    await operating.settle()
    assert operating.reasons() == ["AttemptStarted", "Available"]
    operating.edit(lifecycle="Suspended")
    await operating.settle()
    assert operating.reasons() == ["Paused", "Suspended"]
    operating.edit(lifecycle="Running")
    await operating.settle()
    assert operating.reasons() == ["Paused", "Available"]
    operating.edit(lifecycle="Stopped")
    await operating.settle()
    assert operating.reasons() == ["Stopped"]


async def test_a_failure_is_told_with_its_cause_and_its_recovery() -> None:
    operating = Operating(replicas=2)
    await operating.settle()
    operating.reasons()
    operating.cluster.fail("chat-1-0-0", exit_code=137)
    await operating.round()
    assert [(event.type, event.reason) for event in operating.told] == [("Warning", "GroupFailed")]
    assert "chat-1-0-0 rank 0: RankFailed" in operating.told[0].message
    operating.cluster.now += 10
    await operating.settle()
    assert operating.reasons() == ["GroupFailed", "AttemptStarted"]


async def test_giving_up_is_told() -> None:
    operating = Operating(failurePolicy={"maxRestarts": 0})
    await operating.settle()
    operating.reasons()
    operating.cluster.fail("chat-0-0-0")
    await operating.settle()
    assert operating.reasons() == ["GroupFailed", "RestartBudgetExceeded"]


async def test_an_invalid_edit_touches_no_pod_and_mending_it_goes_on() -> None:
    operating = Operating(replicas=2)
    await operating.settle()
    operating.reasons()
    pods = dict(operating.cluster.pods)
    operating.edit(replicas=0, lifecycle="Stopped")
    await operating.round()
    await operating.round()
    assert operating.cluster.pods == pods
    assert operating.obj["status"]["phase"] == "Failed"
    assert operating.reasons() == ["InvalidSpec"]
    operating.edit(replicas=2, lifecycle="Running")
    await operating.round()
    assert operating.obj["status"]["phase"] == "Running"


async def test_a_pod_template_that_fits_no_pod_is_invalid_before_anything_is_replaced() -> None:
    operating = Operating()
    await operating.settle()
    operating.edit(podTemplate={"spec": {"containers": "megatron"}})
    await operating.round()
    assert list(operating.cluster.pods) == ["chat-0-0-0"]
    failed = [each for each in operating.obj["status"]["conditions"] if each["type"] == "Failed"]
    assert failed[0]["message"].startswith("spec.podTemplate.spec.containers: megatron: must be a list")


async def test_what_cannot_be_seen_changes_nothing_and_is_tried_again() -> None:
    operating = Operating()
    await operating.settle()
    operating.cluster.blind = True
    result = await operating.round()
    assert result.requeue_after == AFTER_TROUBLE
    assert result.patch == {}


async def test_pods_wait_until_what_they_need_is_there() -> None:
    operating = Operating()
    operating.cluster.refuses = {CreateSecret: WorldError("secrets: too many requests")}
    result = await operating.round()
    assert operating.cluster.pods == {}
    assert result.requeue_after is not None
    assert result.requeue_after <= AFTER_TROUBLE
    assert "too many requests" in str(operating.obj["status"]["conditions"])
    operating.cluster.refuses = {}
    await operating.round()
    assert list(operating.cluster.pods) == ["chat-0-0-0"]


async def test_a_refusal_is_told_and_tried_again_later() -> None:
    operating = Operating()
    operating.cluster.refuses = {CreatePod: ActionRefused("pods is forbidden: exceeded quota")}
    for _ in range(3):
        result = await operating.round()
    assert result.requeue_after is not None
    assert result.requeue_after <= LONGEST_AFTER_TROUBLE
    assert operating.reasons() == ["ApplyFailed"]


async def test_a_resource_that_fails_repeatedly_waits_longer_each_time_until_a_round_succeeds() -> None:
    operating = Operating()
    operating.cluster.refuses = {CreatePod: ActionRefused("pods is forbidden: exceeded quota")}
    delays = [(await operating.round()).requeue_after for _ in range(7)]
    assert delays == [3, 6, 12, 24, 48, LONGEST_AFTER_TROUBLE, LONGEST_AFTER_TROUBLE]
    operating.cluster.refuses = {}
    await operating.round()
    operating.cluster.pods.clear()
    operating.cluster.refuses = {CreatePod: ActionRefused("pods is forbidden: exceeded quota")}
    assert (await operating.round()).requeue_after == AFTER_TROUBLE


async def test_a_failing_action_does_not_delay_what_time_alone_requires() -> None:
    operating = Operating(replicas=2, expose={"ingress": {}})
    await operating.settle()
    operating.cluster.refuses_kinds = {"Ingress": WorldError("ingresses: too many requests")}
    operating.cluster.children = dict.fromkeys(operating.cluster.children, "")
    for _ in range(3):
        assert (await operating.round()).failed
    operating.cluster.fail("chat-1-0-0")
    result = await operating.round()
    assert result.requeue_after == 10  # the back-off of the failed replica group


async def test_a_large_resource_gets_its_pods_in_several_rounds() -> None:
    operating = Operating(parallelism={"tensor": 2}, replicas=40)
    counts = []
    for _ in range(3):
        operating.cluster.asked.clear()
        result = await operating.round()
        counts.append(sum(isinstance(action, CreatePod) for action in operating.cluster.asked))
    assert counts == [MAX_CREATIONS, MAX_CREATIONS, 80 - 2 * MAX_CREATIONS]
    await operating.settle()
    assert operating.obj["status"]["ready"] == "40/40"
    assert result.status.restarts == 0


async def test_a_plan_that_leaves_pods_to_the_next_one_is_followed_by_it_at_once() -> None:
    operating = Operating(replicas=MAX_CREATIONS + 1)
    assert (await operating.round()).requeue_after == 0
    assert (await operating.round()).requeue_after == 1


async def test_a_round_stops_to_create_pods_after_a_few_were_refused() -> None:
    operating = Operating(replicas=20)
    operating.cluster.refuses = {CreatePod: ActionRefused("pods is forbidden: exceeded quota")}
    result = await operating.round()
    assert sum(isinstance(action, CreatePod) for action in operating.cluster.asked) == MAX_FAILED_CREATIONS
    assert result.requeue_after == AFTER_TROUBLE


async def test_where_nothing_can_be_made_any_more_all_pods_end_without_a_word_of_trouble() -> None:
    operating = Operating(replicas=2)
    await operating.settle()
    operating.reasons()
    refusal = NamespaceTerminating("because it is being terminated")
    operating.cluster.refuses = dict.fromkeys((ApplyChild, CreatePod, CreateSecret), refusal)
    operating.cluster.children = {key: text for key, text in operating.cluster.children.items() if "Secret" in key}
    for _ in range(3):
        result = await operating.round()
    assert (operating.obj["status"]["phase"], result.problems) == ("Terminating", ())
    assert all(pod.deleting for pod in operating.cluster.pods.values())
    assert all(each.status == "False" for each in result.status.conditions if each.type == "Degraded")
    operating.cluster.pods.clear()
    await operating.round()
    result = await operating.round()
    assert (result.patch, result.requeue_after) == ({}, None)


async def test_a_route_that_is_refused_is_told_and_keeps_no_pod_from_serving() -> None:
    operating = Operating(expose={"ingress": {"host": "chat.example.com"}})
    operating.cluster.refuses_kinds = {"Ingress": ActionRefused("the host is taken by another Ingress")}
    await operating.settle()
    assert operating.obj["status"]["phase"] == "Running"
    assert sorted(operating.reasons()) == ["ApplyFailed", "AttemptStarted", "Available"]
    degraded = next(each for each in operating.obj["status"]["conditions"] if each["type"] == "Degraded")
    assert (degraded["status"], degraded["message"]) == ("True", "the host is taken by another Ingress")


async def test_a_kind_that_the_cluster_lacks_is_told_once_and_waited_for_without_looking() -> None:
    operating = Operating(expose={"httpRoute": {"parentRefs": [{"name": "public"}]}})
    operating.cluster.refuses_kinds = {"HTTPRoute": KindMissing("HTTPRoute: no such kind; install it")}
    result = await operating.settle()
    assert (result.requeue_after, result.patch) == (None, {})
    assert operating.obj["status"]["phase"] == "Running"
    assert operating.reasons().count("ApplyFailed") == 1
    operating.cluster.refuses_kinds = {}
    await operating.round()
    result = await operating.round()
    assert (result.problems, result.requeue_after) == ((), None)


async def test_what_else_failed_is_tried_again_though_a_kind_is_missing() -> None:
    operating = Operating(expose={"ingress": {}, "httpRoute": {"parentRefs": [{"name": "public"}]}})
    missing, busy = KindMissing("HTTPRoute: no such kind"), WorldError("ingresses: too many requests")
    operating.cluster.refuses_kinds = {"HTTPRoute": missing, "Ingress": busy}
    result = await operating.settle()
    assert result.requeue_after == LONGEST_AFTER_TROUBLE


async def test_a_signal_that_comes_too_late_is_no_trouble() -> None:
    operating = Operating()
    await operating.settle()
    operating.edit(lifecycle="Paused")
    world = operating.cluster.world()
    await operating.round()

    async def stale(_name: str, _namespace: str) -> World:
        return world

    operating.cluster.observe = stale  # type: ignore[method-assign]
    result = await operating.round()
    assert operating.cluster.refused == ["pause"]
    assert all(each.status == "False" for each in result.status.conditions if each.type == "Degraded")


def test_a_status_patch_removes_what_is_gone_and_leaves_what_is_equal() -> None:
    before = {"phase": "Running", "engineState": "RUNNING", "groups": [1]}
    after = {"phase": "Failed", "groups": [1]}
    assert status_patch(before, after) == {"phase": "Failed", "engineState": None}


async def test_a_newborn_resource_has_its_pods_and_their_secret_before_anything_else() -> None:
    operating = Operating(replicas=2)
    operating.cluster.blind = True
    await begin(operating.obj, operating.cluster)
    assert set(operating.cluster.children) == {"Secret/chat-keys"}
    assert sorted(operating.cluster.pods) == ["chat-0-0-0", "chat-1-0-0"]
    operating.cluster.blind = False
    await operating.settle()
    assert sorted(operating.cluster.pods) == ["chat-0-0-0", "chat-1-0-0"]
    assert operating.reasons() == ["AttemptStarted", "AttemptStarted", "Available"]


async def test_a_newborn_resource_whose_secret_cannot_be_made_has_no_pods() -> None:
    operating = Operating()
    operating.cluster.refuses[CreateSecret] = ActionRefused("forbidden")
    await begin(operating.obj, operating.cluster)
    assert operating.cluster.pods == {}
    result = await operating.round()
    assert result.problems == ("forbidden",)


async def test_an_invalid_newborn_resource_is_left_to_the_look_that_follows() -> None:
    operating = Operating(replicas=-1)
    await begin(operating.obj, operating.cluster)
    assert (operating.cluster.pods, operating.cluster.children) == ({}, {})
