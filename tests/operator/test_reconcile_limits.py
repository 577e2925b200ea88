"""Rounds of resources that are large, fail repeatedly, or have names of other owners."""

from __future__ import annotations

import pytest
from planning_support.operating import Operating

from megatron_operator.observed_state import ActionRefused, AdapterError, CreatePod, PodPhase
from megatron_operator.plan import MAX_CREATIONS
from megatron_operator.reconcile import (
    AFTER_TROUBLE,
    LONGEST_AFTER_TROUBLE,
    MAX_FAILED_CREATIONS,
    WHILE_PROGRESSING,
    begin,
)


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
    operating.cluster.refuses_kinds = {"Ingress": AdapterError("ingresses: too many requests")}
    operating.cluster.children = dict.fromkeys(operating.cluster.children, "")
    for _ in range(3):
        assert (await operating.round()).failed
    operating.cluster.fail("chat-1-0-0")
    result = await operating.round()
    assert result.requeue_after == 10  # the backoff of the failed replica group


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


async def test_a_plan_with_remaining_pods_is_followed_by_the_next_at_once() -> None:
    operating = Operating(replicas=MAX_CREATIONS + 1)
    assert (await operating.round()).requeue_after == 0
    assert (await operating.round()).requeue_after == 1


async def test_a_round_stops_creating_pods_after_a_few_rejections() -> None:
    operating = Operating(replicas=20)
    operating.cluster.refuses = {CreatePod: ActionRefused("pods is forbidden: exceeded quota")}
    result = await operating.round()
    assert sum(isinstance(action, CreatePod) for action in operating.cluster.asked) == MAX_FAILED_CREATIONS
    assert result.requeue_after == AFTER_TROUBLE


@pytest.mark.parametrize("service", ["chat", "chat-coordinator", "chat-pods"])
async def test_a_resource_whose_service_belongs_to_another_owner_has_no_pods_and_no_url(service: str) -> None:
    operating = Operating()
    operating.cluster.taken = {f"Service/{service}"}
    await begin(operating.obj, operating.cluster)
    await operating.settle()
    assert operating.cluster.pods == {}
    ready = next(each for each in operating.obj["status"]["conditions"] if each["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NameTaken")
    assert ready["message"].startswith(f"Service {service} has another owner")
    assert ("url" in operating.obj["status"]) == (service != "chat")
    operating.cluster.taken = set()
    await operating.settle()
    assert operating.obj["status"]["phase"] == "Running"
    assert operating.obj["status"]["url"] == "http://chat.models.svc:8000/v1"


async def test_pods_that_run_while_their_service_has_another_owner_are_not_ready_for_clients() -> None:
    operating = Operating()
    await operating.settle()
    del operating.cluster.children["Service/chat"]
    operating.cluster.taken = {"Service/chat"}
    await operating.round()
    status = (await operating.round()).status
    assert [(each.status, each.reason) for each in status.conditions if each.type in ("Ready", "Available")] == [
        ("False", "NameTaken"),
        ("False", "NameTaken"),
    ]
    assert status.url is None
    assert list(operating.cluster.pods) == ["chat-0-0-0"]


async def test_a_resource_that_waits_for_a_node_is_woken_by_events_of_its_pods() -> None:
    operating = Operating(replicas=2)
    operating.cluster.has_room = False
    result = await operating.settle()
    assert (result.requeue_after, result.is_settled) == (None, False)
    operating.cluster.schedule("chat-0-0-0")
    await operating.round()
    operating.cluster.change("chat-0-0-0", phase=PodPhase.RUNNING, rank_phase="Loading")
    assert (await operating.round()).requeue_after == WHILE_PROGRESSING
