"""Whole rounds: observe, plan, apply, report."""

from __future__ import annotations

from planning_support.operating import Operating

from megatron_operator.api.v1alpha1 import Cache
from megatron_operator.observed_state import (
    ActionRefused,
    AdapterError,
    ApplyChild,
    CreatePod,
    CreateSecret,
    KindMissing,
    NamespaceTerminating,
    ObservedState,
)
from megatron_operator.reconcile import AFTER_TROUBLE, LONGEST_AFTER_TROUBLE, begin, status_patch


async def test_a_settled_resource_causes_no_writes_events_or_requeues() -> None:
    operating = Operating(replicas=2)
    result = await operating.settle()
    assert result.patch == {}
    assert result.events == ()
    assert result.requeue_after is None


async def test_each_transition_has_one_event() -> None:
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


async def test_a_failure_and_its_recovery_have_events() -> None:
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


async def test_an_exhausted_budget_has_an_event() -> None:
    operating = Operating(failurePolicy={"maxRestarts": 0})
    await operating.settle()
    operating.reasons()
    operating.cluster.fail("chat-0-0-0")
    await operating.settle()
    assert operating.reasons() == ["GroupFailed", "RestartBudgetExceeded"]


async def test_an_invalid_edit_changes_no_pod_until_it_is_corrected() -> None:
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


async def test_an_invalid_pod_template_is_rejected_before_any_pod_is_replaced() -> None:
    operating = Operating()
    await operating.settle()
    operating.edit(podTemplate={"spec": {"containers": "megatron"}})
    await operating.round()
    assert list(operating.cluster.pods) == ["chat-0-0-0"]
    failed = [each for each in operating.obj["status"]["conditions"] if each["type"] == "Failed"]
    assert failed[0]["message"].startswith("spec.podTemplate.spec.containers: megatron: must be a list")


async def test_a_failed_observation_changes_nothing_and_is_retried() -> None:
    operating = Operating()
    await operating.settle()
    operating.cluster.blind = True
    result = await operating.round()
    assert result.requeue_after == AFTER_TROUBLE
    assert result.patch == {}


async def test_pods_are_created_after_the_objects_that_they_need() -> None:
    operating = Operating()
    operating.cluster.refuses = {CreateSecret: AdapterError("secrets: too many requests")}
    result = await operating.round()
    assert operating.cluster.pods == {}
    assert result.requeue_after is not None
    assert result.requeue_after <= AFTER_TROUBLE
    assert "too many requests" in str(operating.obj["status"]["conditions"])
    operating.cluster.refuses = {}
    await operating.round()
    assert list(operating.cluster.pods) == ["chat-0-0-0"]


async def test_a_rejected_action_is_reported_and_retried_later() -> None:
    operating = Operating()
    operating.cluster.refuses = {CreatePod: ActionRefused("pods is forbidden: exceeded quota")}
    for _ in range(3):
        result = await operating.round()
    assert result.requeue_after is not None
    assert result.requeue_after <= LONGEST_AFTER_TROUBLE
    assert operating.reasons() == ["ApplyFailed"]


async def test_in_a_terminating_namespace_pods_end_without_error_messages() -> None:
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


async def test_a_rejected_route_is_reported_and_does_not_affect_pods() -> None:
    operating = Operating(expose={"ingress": {"host": "chat.example.com"}})
    operating.cluster.refuses_kinds = {"Ingress": ActionRefused("the host is taken by another Ingress")}
    await operating.settle()
    assert operating.obj["status"]["phase"] == "Running"
    assert sorted(operating.reasons()) == ["ApplyFailed", "AttemptStarted", "Available"]
    degraded = next(each for each in operating.obj["status"]["conditions"] if each["type"] == "Degraded")
    assert (degraded["status"], degraded["message"]) == ("True", "the host is taken by another Ingress")


async def test_a_missing_kind_is_reported_once_and_causes_no_polling() -> None:
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


async def test_other_failed_actions_are_retried_while_a_kind_is_missing() -> None:
    operating = Operating(expose={"ingress": {}, "httpRoute": {"parentRefs": [{"name": "public"}]}})
    missing, busy = KindMissing("HTTPRoute: no such kind"), AdapterError("ingresses: too many requests")
    operating.cluster.refuses_kinds = {"HTTPRoute": missing, "Ingress": busy}
    result = await operating.settle()
    assert result.requeue_after == LONGEST_AFTER_TROUBLE


async def test_a_signal_that_arrives_too_late_is_not_an_error() -> None:
    operating = Operating()
    await operating.settle()
    operating.edit(lifecycle="Paused")
    observed = operating.cluster.observed()
    await operating.round()

    async def stale(_name: str, _namespace: str, _cache: Cache | None = None) -> ObservedState:
        return observed

    operating.cluster.observe = stale  # type: ignore[method-assign]
    result = await operating.round()
    assert operating.cluster.refused == ["pause"]
    assert all(each.status == "False" for each in result.status.conditions if each.type == "Degraded")


def test_a_status_patch_removes_old_fields_and_omits_equal_ones() -> None:
    before = {"phase": "Running", "engineState": "RUNNING", "groups": [1]}
    after = {"phase": "Failed", "groups": [1]}
    assert status_patch(before, after) == {"phase": "Failed", "engineState": None}


async def test_a_new_resource_gets_pods_and_secret_first() -> None:
    operating = Operating(replicas=2)
    operating.cluster.blind = True
    await begin(operating.obj, operating.cluster)
    services = {"Service/chat", "Service/chat-coordinator", "Service/chat-pods"}
    assert set(operating.cluster.children) == {"Secret/chat-keys", *services}
    assert sorted(operating.cluster.pods) == ["chat-0-0-0", "chat-1-0-0"]
    operating.cluster.blind = False
    await operating.settle()
    assert sorted(operating.cluster.pods) == ["chat-0-0-0", "chat-1-0-0"]
    assert operating.reasons() == ["AttemptStarted", "AttemptStarted", "Available"]


async def test_a_new_resource_gets_no_pods_when_its_secret_can_not_be_created() -> None:
    operating = Operating()
    operating.cluster.refuses[CreateSecret] = ActionRefused("forbidden")
    await begin(operating.obj, operating.cluster)
    assert operating.cluster.pods == {}
    result = await operating.round()
    assert result.problems == ("forbidden",)


async def test_an_invalid_new_resource_is_handled_by_the_first_round() -> None:
    operating = Operating(replicas=-1)
    await begin(operating.obj, operating.cluster)
    assert (operating.cluster.pods, operating.cluster.children) == ({}, {})
