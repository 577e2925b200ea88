"""Groups of pods in a queue of Kueue: what they wait for, and how they leave the queue."""

from __future__ import annotations

from typing import Any

import pytest
from planning_support.planning import Planning, deleted

from megatron_operator import kueue
from megatron_operator.api.v1alpha1 import ConditionType
from megatron_operator.kubernetes.pod_status import observed_pod
from megatron_operator.observed_state import Action, DeleteChild, Failure, PodPhase

TWO_PODS: dict[str, Any] = {"parallelism": {"tensor": 2}}
FIRST, SECOND = "chat-0-0-0", "chat-0-0-1"
WORKLOAD = "Workload chat-0-0 of LocalQueue team-a"
CONDITION = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked by gates"}


def queued() -> Planning:
    """A group of two pods that Kueue has not admitted."""
    planning = Planning(scheduling={"queueName": "team-a"}, **TWO_PODS)
    planning.cluster.has_room = False
    planning.round()
    for name in (FIRST, SECOND):
        waiting = Failure("SchedulingGated", f"Kueue has not admitted {WORKLOAD} yet")
        planning.cluster.change(name, workload="chat-0-0", waiting=waiting)
    return planning


def left(actions: list[Action]) -> list[str]:
    """Names of the Workloads that are deleted."""
    return [each.name for each in actions if isinstance(each, DeleteChild) and each.kind == kueue.WORKLOAD]


def gated_pod(gates: list[str], *, managed: bool = True) -> dict[str, Any]:
    prefix = "inference.megatron.dev"
    labels = {f"{prefix}/replica-group": "0", f"{prefix}/attempt": "0", f"{prefix}/index": "0"}
    if managed:
        labels |= {kueue.MANAGED: "true", kueue.QUEUE_LABEL: "team-a", kueue.GROUP_LABEL: "chat-0-0"}
    finalizers = [kueue.MANAGED] if managed else []
    times = {"creationTimestamp": "2026-11-21T10:00:00Z"}
    return {
        "metadata": {"name": FIRST, "uid": "u", "labels": labels, "finalizers": finalizers, **times},
        "spec": {"schedulingGates": [{"name": gate} for gate in gates]},
        "status": {"phase": "Pending", "conditions": [CONDITION]},
    }


@pytest.mark.parametrize(
    ("gates", "managed", "words"),
    [
        ([kueue.ADMISSION_GATE, kueue.TOPOLOGY_GATE], True, f"Kueue has not admitted {WORKLOAD} yet"),
        ([], True, f"Kueue has not admitted {WORKLOAD} yet"),
        (
            [kueue.TOPOLOGY_GATE],
            True,
            f"Kueue has admitted {WORKLOAD}, but not assigned its topology domain yet",
        ),
        (["example.com/quota"], True, "held back by example.com/quota"),
        (["example.com/quota"], False, "held back by example.com/quota"),
        ([], False, "blocked by gates"),
    ],
)
def test_a_gated_pod_waits_for_its_queue_in_words(gates: list[str], managed: bool, words: str) -> None:
    seen = observed_pod(gated_pod(gates, managed=managed))
    assert seen is not None
    assert seen.waiting == Failure("SchedulingGated", words)
    assert seen.workload == ("chat-0-0" if managed else None)


def test_a_pod_that_kueue_evicts_is_a_disruption() -> None:
    pod = gated_pod([])
    target = {"type": "TerminationTarget", "status": "True", "reason": "Preempted", "message": "by a higher priority"}
    pod["status"] = {"phase": "Running", "conditions": [target]}
    seen = observed_pod(pod)
    assert seen is not None
    assert seen.disruption == Failure("Preempted", "by a higher priority", disruption=True)


def test_a_queued_group_is_neither_replaced_nor_failed_however_long_it_waits() -> None:
    planning = queued()
    for _ in range(5):
        planning.cluster.now += 86_400
        assert planning.round() == []
    ready = planning.status.condition(ConditionType.READY)
    assert ready is not None
    assert (ready.reason, planning.status.replica_groups[0].restarts) == ("SchedulingGated", 0)
    assert f"Kueue has not admitted {WORKLOAD} yet" in ready.message


@pytest.mark.parametrize("end", [{"lifecycle": "Stopped"}, {"parallelism": {"tensor": 3}}])
def test_the_workload_of_deleted_pods_without_a_node_is_deleted(end: dict[str, Any]) -> None:
    planning = queued()
    planning.spec |= end
    actions = planning.round()
    assert (deleted(actions), left(actions)) == ([SECOND, FIRST], [])
    assert left(planning.round()) == ["chat-0-0"]
    assert left(planning.round()) == ["chat-0-0"]
    planning.cluster.start_all()
    assert left(planning.round()) == []


def test_the_workload_keeps_its_quota_until_the_pods_with_a_node_have_ended() -> None:
    planning = queued()
    planning.cluster.change(FIRST, node="n1", phase=PodPhase.RUNNING)
    planning.spec["lifecycle"] = "Stopped"
    planning.round()
    assert left(planning.round()) == []
    planning.cluster.change(FIRST, phase=PodPhase.SUCCEEDED)
    assert left(planning.round()) == ["chat-0-0"]


def test_pods_that_ran_leave_the_queue_by_themselves() -> None:
    planning = Planning(scheduling={"queueName": "team-a"}, **TWO_PODS).settled()
    for name in (FIRST, SECOND):
        planning.cluster.change(name, workload="chat-0-0", node="n1")
    planning.spec["lifecycle"] = "Stopped"
    planning.round()
    assert left(planning.round()) == []


def test_the_cause_of_an_eviction_is_in_the_status() -> None:
    planning = Planning(scheduling={"queueName": "team-a"}, **TWO_PODS).settled()
    for name in (FIRST, SECOND):
        evicted = Failure("Preempted", "by a higher priority", disruption=True)
        planning.cluster.change(name, workload="chat-0-0", node="n1", disruption=evicted)
        planning.cluster.delete(name)
    planning.round()
    ready = planning.status.condition(ConditionType.READY)
    assert ready is not None
    assert "to end before the next attempt; Preempted: by a higher priority" in ready.message
    assert planning.status.replica_groups[0].restarts == 0
