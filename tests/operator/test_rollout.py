"""Rollouts: budget, surge, pause and canary, and templates that do not work."""

from __future__ import annotations

import random
from typing import Any

import pytest
from planning_support.planning import Planning, created, deleted
from planning_support.resources import parsed

from megatron_operator.api.v1alpha1 import ConditionType
from megatron_operator.observed_state import Failure
from megatron_operator.replica_groups import observe_replica_groups
from megatron_operator.rollout import RolloutBudget, rollout_budget
from megatron_operator.settings import Settings

BAD_IMAGE = "registry/broken:1"


def ready_groups(planning: Planning) -> set[int]:
    observed, resource = planning.cluster.observed(), planning.resource
    count = resource.spec.replicas + 3
    groups = observe_replica_groups(resource, observed, count)
    policy = resource.spec.failure_policy
    return {group.index for group in groups if group.state(policy, observed.now) == "Ready"}


def roll(planning: Planning, rounds: int = 40) -> list[str]:
    """Rounds in which every pod starts; returns the names of the deleted pods."""
    gone: list[str] = []
    for _ in range(rounds):
        gone += deleted(planning.round())
        planning.cluster.start_all()
        planning.cluster.now += 5
    return gone


def fail_to_pull(planning: Planning) -> None:
    """Every new pod waits for a missing image."""
    for name, pod in planning.cluster.pods.items():
        if pod.phase == "Pending":
            planning.cluster.change(name, waiting=Failure("ImagePull", f"image {BAD_IMAGE}: not found"))


def with_bad_image(planning: Planning, rounds: int = 10) -> None:
    planning.spec["image"] = BAD_IMAGE
    for _ in range(rounds):
        planning.round()
        for name in [name for name, pod in planning.cluster.pods.items() if pod.deleting]:
            planning.cluster.remove(name)
        fail_to_pull(planning)
        planning.cluster.now += 1


@pytest.mark.parametrize(
    ("rollout", "device", "has_spare_nodes", "budget"),
    [
        ({}, "cpu", True, (0, 1)),
        ({}, "cpu", False, (1, 0)),
        ({}, "cuda", True, (1, 0)),
        ({"maxSurge": 2}, "cuda", True, (0, 2)),
        ({"maxSurge": 0}, "cpu", True, (1, 0)),
        ({"maxUnavailable": 2}, "cpu", True, (2, 0)),
        ({"maxUnavailable": 0}, "cuda", True, (0, 1)),
        ({"maxUnavailable": 1, "maxSurge": 1}, "cuda", True, (1, 1)),
    ],
)
def test_the_default_budget_depends_on_the_device_and_the_other_field(
    rollout: dict[str, int], device: str, has_spare_nodes: bool, budget: tuple[int, int]
) -> None:
    resource = parsed(rollout=rollout, pods={"device": device})
    assert rollout_budget(resource, Settings(has_spare_nodes=has_spare_nodes)) == RolloutBudget(*budget)


# --- without surge


def test_a_briefly_unready_group_is_kept_while_another_one_is_replaced() -> None:
    planning = Planning(replicas=3).settled()
    with_bad_image(planning)
    assert ready_groups(planning) == {0, 1}
    planning.cluster.unready("chat-1-0-0")
    for _ in range(5):
        assert deleted(planning.round()) == []
    planning.cluster.change("chat-1-0-0", ready=True, ready_changed_at=planning.cluster.now)
    assert planning.round() == []
    assert ready_groups(planning) == {0, 1}


def test_a_group_that_is_not_ready_is_replaced_first_within_the_budget() -> None:
    planning = Planning(replicas=3).settled()
    planning.cluster.now += 60
    planning.cluster.unready("chat-1-0-0")
    planning.spec["restart"] = {"id": "now"}
    assert deleted(planning.round()) == ["chat-1-0-0"]
    assert deleted(planning.round()) == []


def test_max_unavailable_groups_are_replaced_at_a_time() -> None:
    planning = Planning(replicas=5, rollout={"maxUnavailable": 2}).settled()
    planning.spec["restart"] = {"id": "now"}
    assert sorted(deleted(planning.round())) == ["chat-3-0-0", "chat-4-0-0"]
    assert deleted(planning.round()) == []
    roll(planning)
    assert sorted(planning.cluster.pods) == [f"chat-{group}-1-0" for group in range(5)]


def test_a_failing_rollout_stops_and_reports_how_to_roll_back() -> None:
    planning = Planning(replicas=3).settled()
    with_bad_image(planning)
    planning.round()
    degraded = planning.status.condition(ConditionType.DEGRADED)
    assert (degraded.status, degraded.reason) == ("True", "RolloutStalled")
    assert "replica group 0, 1 keeps the previous template" in degraded.message
    assert f"image {BAD_IMAGE}: not found" in degraded.message
    assert "apply the previous spec again" in degraded.message
    assert planning.status.condition(ConditionType.READY).status == "True"


def test_a_rollback_replaces_only_the_updated_groups() -> None:
    planning = Planning(replicas=3).settled()
    with_bad_image(planning)
    del planning.spec["image"]
    assert deleted(planning.round()) == ["chat-2-1-0"]
    roll(planning)
    assert sorted(planning.cluster.pods) == ["chat-0-0-0", "chat-1-0-0", "chat-2-2-0"]
    assert planning.status.condition(ConditionType.DEGRADED).status == "False"


def test_a_crash_looping_group_stops_the_rollout() -> None:
    planning = Planning(replicas=3, rollout={"maxUnavailable": 2}).settled()
    planning.spec["restart"] = {"id": "now"}
    planning.round()
    planning.cluster.remove("chat-2-0-0")
    planning.round()
    planning.cluster.fail("chat-2-1-0")
    for _ in range(3):
        planning.round()
    assert [pod.name for pod in planning.cluster.live(0)] == ["chat-0-0-0"]
    assert planning.status.condition(ConditionType.DEGRADED).reason == "RolloutStalled"


# --- with surge


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("surge", [1, 2])
def test_a_surge_replaces_all_groups_without_losing_ready_ones(replicas: int, surge: int) -> None:
    planning = Planning(replicas=replicas, rollout={"maxSurge": surge}).settled()
    planning.spec["restart"] = {"id": "now"}
    for _ in range(60):
        planning.round()
        assert len(ready_groups(planning)) >= replicas
        assert len({pod.group for pod in planning.cluster.live()}) <= replicas + surge
        assert len(planning.cluster.selected()) <= 1
        planning.cluster.start_all()
        planning.cluster.now += 5
    assert sorted(planning.cluster.pods) == [f"chat-{group}-1-0" for group in range(replicas)]
    assert planning.round() == []
    assert planning.status.ready == f"{replicas}/{replicas}"
    assert len(planning.status.replica_groups) == replicas


def test_under_a_surge_a_broken_template_keeps_all_groups_serving() -> None:
    planning = Planning(replicas=1, rollout={"maxSurge": 1}).settled()
    with_bad_image(planning)
    assert ready_groups(planning) == {0}
    planning.round()
    degraded = planning.status.condition(ConditionType.DEGRADED)
    assert (degraded.reason, planning.status.ready) == ("RolloutStalled", "1/1")
    del planning.spec["image"]
    roll(planning)
    assert sorted(planning.cluster.pods) == ["chat-0-0-0"]


def test_a_surge_without_a_free_node_waits_and_reports_it() -> None:
    planning = Planning(replicas=2, rollout={"maxSurge": 1}).settled()
    planning.cluster.has_room = False
    planning.spec["restart"] = {"id": "now"}
    assert created(planning.round()) == ["chat-2-0-0"]
    assert roll(planning) == []
    progress = planning.status.condition(ConditionType.PROGRESSING)
    assert (progress.status, progress.reason) == ("True", "Unschedulable")
    assert planning.status.condition(ConditionType.DEGRADED).status == "False"


def test_scaling_down_removes_groups_during_a_surge() -> None:
    planning = Planning(replicas=3, rollout={"maxSurge": 1}).settled()
    planning.spec["replicas"] = 2
    assert deleted(planning.round()) == ["chat-2-0-0"]


# --- pause and canary


def test_a_paused_rollout_replaces_nothing_until_it_is_resumed() -> None:
    planning = Planning(replicas=2, rollout={"paused": True}).settled()
    planning.spec["restart"] = {"id": "now"}
    assert roll(planning, 5) == []
    progress = planning.status.condition(ConditionType.PROGRESSING)
    assert (progress.status, progress.reason) == ("False", "RolloutPaused")
    planning.spec["rollout"] = {}
    assert roll(planning) == ["chat-1-0-0", "chat-0-0-0"]


def test_a_partition_keeps_the_groups_below_it() -> None:
    planning = Planning(replicas=3, rollout={"partition": 2}).settled()
    planning.spec["restart"] = {"id": "now"}
    assert roll(planning) == ["chat-2-0-0"]
    progress = planning.status.condition(ConditionType.PROGRESSING)
    assert (progress.status, progress.reason) == ("False", "RolloutPartitioned")
    planning.spec["rollout"] = {"partition": 1}
    assert roll(planning) == ["chat-1-0-0"]


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": {"drainTimeout": "5m"}},
        {"rollout": {"maxSurge": 1, "partition": 1}},
        {"imagePullPolicy": "Always"},
        {"failurePolicy": {"maxRestarts": 9}},
    ],
)
def test_fields_that_need_no_restart_replace_no_pods(change: dict[str, Any]) -> None:
    planning = Planning(replicas=2).settled()
    planning.spec |= change
    assert roll(planning, 5) == []


# --- the budget in random histories


@pytest.mark.parametrize("seed", range(30))
def test_no_rollout_takes_more_than_its_budget(seed: int) -> None:
    chance = random.Random(seed)
    replicas = chance.randint(1, 4)
    rollout = chance.choice([{"maxUnavailable": 1}, {"maxUnavailable": 2}, {"maxSurge": 1}, {"maxSurge": 2}])
    planning = Planning(replicas=replicas, rollout=rollout).settled()
    budget = rollout_budget(planning.resource, planning.settings)
    for step in range(60):
        planning.cluster.now += chance.randint(1, 20)
        if step % 20 == 5:
            planning.spec["restart"] = {"id": str(step)}
        for name, pod in list(planning.cluster.pods.items()):
            if pod.ready and chance.random() < 0.1:
                planning.cluster.unready(name)
            elif chance.random() < 0.5:
                planning.cluster.start(name)
        ready, pods = ready_groups(planning), dict(planning.cluster.pods)
        gone = {pods[name].group for name in deleted(planning.round()) if pods[name].ready}
        gone = {group for group in gone if group < replicas}
        if gone:
            assert len(ready - gone) >= replicas - budget.max_unavailable
    roll(planning, 120)
    assert {pod.group for pod in planning.cluster.pods.values()} == set(range(replicas))
    assert planning.status.ready == f"{replicas}/{replicas}"
