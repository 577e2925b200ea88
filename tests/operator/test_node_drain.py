"""Cordoned nodes: successors, drains without room, and the PodDisruptionBudget that waits for them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from planning_support.cordons import ClusterWithCordons
from planning_support.planning import Planning, created, deleted

from megatron_operator import names
from megatron_operator.api.v1alpha1 import ConditionType
from megatron_operator.events import Event, events_between
from megatron_operator.observed_state import ApplyChild, DeleteChild
from megatron_operator.settings import Settings

TWO_PODS = {"parallelism": {"tensor": 2}}


def unstarted(**spec: Any) -> Planning:
    planning = Planning(**spec)
    planning.cluster = ClusterWithCordons()
    return planning


def on_nodes(**spec: Any) -> Planning:
    """A settled resource on node-a, in a cluster whose nodes the operator may read."""
    return unstarted(**spec).settled()


def cordon(planning: Planning, *, has_room: bool = True) -> None:
    """Cordons node-a; later pods are scheduled on node-b, if it has room."""
    planning.cluster.cordoned = {"node-a"}
    planning.cluster.node, planning.cluster.has_room = "node-b", has_room


def move(planning: Planning, rounds: int = 16) -> None:
    """Rounds in which every pod starts."""
    for _ in range(rounds):
        planning.round()
        planning.cluster.start_all()
        planning.cluster.advance_engine()


def budget(planning: Planning) -> dict[str, Any]:
    """The budget of the next plan in a cluster that has only the keys."""
    planning.cluster.children = {key: "" for key in planning.cluster.children if key.startswith("Secret/")}
    manifests = [action.manifest for action in planning.look().actions if isinstance(action, ApplyChild)]
    (found,) = [dict(each) for each in manifests if each["kind"] == names.BUDGET]
    return found


def progress(planning: Planning) -> tuple[str, str]:
    found = planning.status.condition(ConditionType.PROGRESSING)
    assert found is not None
    return found.reason, found.message


def round_with_events(planning: Planning) -> list[Event]:
    before = planning.status
    planning.round()
    return list(events_between(before, planning.status))


def ready(planning: Planning) -> int:
    return sum(pod.ready and not pod.deleting for pod in planning.cluster.pods.values())


# --- with room


@pytest.mark.parametrize("spec", [{}, {"pods": {"device": "cuda"}}, {"rollout": {"maxSurge": 0}}])
def test_a_group_on_a_cordoned_node_serves_until_its_successor_is_ready(spec: dict[str, Any]) -> None:
    planning = on_nodes(**spec)
    cordon(planning)
    actions = planning.round()
    assert (created(actions), deleted(actions)) == (["chat-1-0-0"], [])
    while not planning.cluster.pods["chat-1-0-0"].ready:
        assert deleted(planning.round()) == []
        planning.cluster.start("chat-1-0-0")
    move(planning)
    assert {pod.name: pod.node for pod in planning.cluster.pods.values()} == {"chat-0-1-0": "node-b"}


def test_all_groups_leave_without_a_moment_with_fewer_ready_groups() -> None:
    planning = on_nodes(replicas=3)
    cordon(planning)
    for _ in range(40):
        planning.round()
        assert ready(planning) >= 3
        planning.cluster.start_all()
    assert {pod.node for pod in planning.cluster.pods.values()} == {"node-b"}
    assert sorted(planning.cluster.pods) == ["chat-0-1-0", "chat-1-1-0", "chat-2-1-0"]


def test_only_the_groups_on_the_cordoned_node_move() -> None:
    planning = on_nodes(replicas=3)
    planning.cluster.change("chat-1-0-0", node="node-c")
    planning.cluster.cordoned = {"node-c"}
    move(planning)
    assert sorted(planning.cluster.pods) == ["chat-0-0-0", "chat-1-1-0", "chat-2-0-0"]


def test_a_group_of_several_pods_moves_when_one_of_its_nodes_is_cordoned() -> None:
    planning = on_nodes(**TWO_PODS)
    planning.cluster.change("chat-0-0-1", node="node-c")
    planning.cluster.cordoned = {"node-c"}
    assert created(planning.round()) == ["chat-1-0-0", "chat-1-0-1"]
    move(planning)
    assert sorted(planning.cluster.pods) == ["chat-0-1-0", "chat-0-1-1"]


def test_a_group_that_has_not_served_leaves_at_once() -> None:
    planning = unstarted()
    planning.round()
    cordon(planning)
    assert deleted(planning.round()) == ["chat-0-0-0"]


def test_the_status_names_node_and_successor() -> None:
    planning = on_nodes()
    cordon(planning)
    (event,) = [event for event in round_with_events(planning) if event.reason == "NodeCordoned"]
    planning.cluster.start("chat-1-0-0")
    planning.round()
    reason, message = progress(planning)
    assert (event.type, reason) == ("Normal", "NodeCordoned")
    assert "replica group 0 runs on cordoned nodes (node-a)" in message
    assert "chat-1-0-0 loads the weights" in message


def test_an_uncordoned_node_keeps_its_group_and_the_successor_goes() -> None:
    planning = on_nodes()
    cordon(planning)
    planning.round()
    planning.cluster.cordoned = set()
    planning.round()
    planning.cluster.start_all()
    assert sorted(planning.cluster.pods) == ["chat-0-0-0"]


def test_a_paused_rollout_moves_groups_all_the_same() -> None:
    planning = on_nodes(rollout={"paused": True})
    cordon(planning)
    move(planning)
    assert sorted(planning.cluster.pods) == ["chat-0-1-0"]


def test_a_successor_that_fails_leaves_the_group_in_place() -> None:
    planning = on_nodes(failurePolicy={"maxRestarts": 0})
    cordon(planning)
    planning.round()
    planning.cluster.fail("chat-1-0-0")
    for _ in range(5):
        planning.cluster.now += 100
        assert "chat-0-0-0" not in deleted(planning.round())
    degraded = planning.status.condition(ConditionType.DEGRADED)
    assert degraded is not None
    assert "chat-1-0-0" in degraded.message


# --- without room


def test_a_successor_without_a_node_is_awaited_for_the_scheduling_timeout() -> None:
    planning = on_nodes(disruption={"schedulingTimeout": "90s"})
    cordon(planning, has_room=False)
    planning.round()
    planning.cluster.now += 89
    assert deleted(planning.round()) == []
    assert planning.look().requeue_after == pytest.approx(1)


def test_without_room_the_group_drains_and_the_status_says_so() -> None:
    planning = on_nodes()
    cordon(planning, has_room=False)
    planning.round()
    planning.cluster.now += 60
    (event,) = [event for event in round_with_events(planning) if event.reason == "NoRoomForSuccessor"]
    assert event.type == "Warning"
    assert planning.cluster.pods["chat-0-0-0"].deleting
    assert "no other node had room within 1m" in progress(planning)[1]


def test_after_a_drain_without_room_the_next_attempt_starts_when_there_is_room() -> None:
    planning = on_nodes()
    cordon(planning, has_room=False)
    planning.round()
    planning.cluster.now += 60
    for _ in range(6):
        planning.round()
        planning.cluster.start_all()
    assert sorted(planning.cluster.pods) == ["chat-0-1-0"]
    planning.cluster.has_room = True
    planning.settled()
    assert planning.cluster.pods["chat-0-1-0"].node == "node-b"


def test_room_for_one_group_moves_one_and_the_others_drain() -> None:
    planning = on_nodes(replicas=2)
    cordon(planning)
    planning.round()
    planning.cluster.has_room = False
    for _ in range(12):
        planning.cluster.start_all()
        planning.round()
        planning.cluster.now += 30
    assert {pod.node for pod in planning.cluster.pods.values()} == {"node-b", None}
    assert ready(planning) == 1


# --- groups that stay


@pytest.mark.parametrize(
    "spec",
    [
        {"disruption": {"cordonedNodesPolicy": "Ignore"}},
        {"scheduling": {"tolerations": [{"operator": "Exists"}]}},
        {"podTemplate": {"spec": {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]}}},
        {"podTemplate": {"spec": {"nodeName": "node-a"}}},
    ],
)
def test_groups_that_may_run_on_cordoned_nodes_stay(spec: dict[str, Any]) -> None:
    planning = on_nodes(**spec)
    cordon(planning)
    assert planning.round() == []
    assert budget(planning)["spec"]["minAvailable"] == 0


def test_a_toleration_of_another_taint_changes_nothing() -> None:
    planning = on_nodes(scheduling={"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]})
    cordon(planning)
    assert created(planning.round()) == ["chat-1-0-0"]


# --- budgets


@pytest.mark.parametrize(
    ("spec", "least"),
    [
        ({}, 1),
        ({"replicas": 3}, 3),
        ({"replicas": 3, **TWO_PODS}, 6),
        ({"replicas": 3, **TWO_PODS, "disruption": {"maxUnavailable": 1}}, 5),
        ({"disruption": {"maxUnavailable": 3}}, 0),
    ],
)
def test_the_budget_counts_pods_of_all_groups(spec: dict[str, Any], least: int) -> None:
    found = budget(on_nodes(**spec))
    assert found["apiVersion"] == "policy/v1"
    assert found["spec"] == {"minAvailable": least, "selector": {"matchLabels": {names.NAME_LABEL: "chat"}}}
    assert found["metadata"]["ownerReferences"][0]["uid"] == "5f9c"


def test_evictions_pass_one_by_one_where_the_operator_cannot_see_cordons() -> None:
    planning = on_nodes(replicas=2)
    planning.cluster.cordoned = None
    assert budget(planning)["spec"]["minAvailable"] == 1


def test_an_older_cluster_gets_the_older_version() -> None:
    planning = on_nodes()
    planning.cluster.budget_kind = names.BUDGET_V1BETA1
    assert budget(planning)["apiVersion"] == "policy/v1beta1"


@pytest.mark.parametrize("way", ["stopped", "disabled"])
def test_the_budget_is_removed_when_nothing_needs_it(way: str) -> None:
    planning = on_nodes()
    if way == "stopped":
        planning.spec["lifecycle"] = "Stopped"
    else:
        planning.settings = Settings(disruption_budgets=False)
    assert DeleteChild(names.BUDGET, "chat") in planning.round()
    assert planning.round() == [] or way == "stopped"


def test_a_scaled_resource_gets_another_budget() -> None:
    planning = on_nodes()
    planning.spec["replicas"] = 2
    assert [each.manifest["kind"] for each in planning.round() if isinstance(each, ApplyChild)] == [names.BUDGET]


# --- random histories


@pytest.mark.repetition
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_groups_end_on_nodes_that_are_not_cordoned(seed: int) -> None:
    chance = random.Random(seed)
    planning = on_nodes(
        replicas=chance.choice([1, 2, 3]), **chance.choice([{}, TWO_PODS]), failurePolicy={"maxRestarts": 99}
    )
    for _ in range(40):
        planning.cluster.cordoned = set(chance.sample(["node-a", "node-b"], chance.choice([0, 1])))
        planning.cluster.node = "node-b" if "node-a" in planning.cluster.cordoned else "node-a"
        planning.cluster.has_room = chance.random() < 0.7
        if planning.cluster.pods and chance.random() < 0.2:
            planning.cluster.fail(chance.choice(sorted(planning.cluster.pods)))
        for _ in range(chance.randrange(4)):
            planning.round()
            planning.cluster.start_all()
        planning.cluster.now += chance.randrange(90)
    planning.cluster.cordoned = {"node-a"}
    planning.cluster.node, planning.cluster.has_room = "node-b", True
    for _ in range(60):
        planning.round()
        planning.cluster.start_all()
        planning.cluster.advance_engine()
        planning.cluster.now += 30
    groups = planning.resource.spec.replicas * planning.resource.spec.pods_per_group
    assert [pod.node for pod in planning.cluster.pods.values()] == ["node-b"] * groups
    assert planning.round() == []
