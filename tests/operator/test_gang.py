"""Groups of several pods: gang objects for a scheduler, and nodes that are given back without one."""

from __future__ import annotations

from typing import Any

import pytest
from planning_support.nodes import Nodes, planning_on
from planning_support.operating import Operating
from planning_support.planning import Planning, created, deleted, restarts
from planning_support.resources import parsed

from megatron_operator import names
from megatron_operator.api.v1alpha1 import ConditionType
from megatron_operator.names import PodIdentity
from megatron_operator.observed_state import Action, ApplyChild, CreatePod, DeleteChild, KindMissing
from megatron_operator.reconcile import begin
from megatron_operator.render import gang_kind, render_pod
from megatron_operator.replica_groups import GANG_PAUSE
from megatron_operator.settings import Settings

TWO_PODS: dict[str, Any] = {"parallelism": {"tensor": 2}}
SERVED = (names.POD_GROUP, names.WORKLOAD)
TIMEOUT = 600


def gangs(actions: list[Action]) -> list[Any]:
    """Gang objects that were created or deleted."""
    applied = [each.manifest for each in actions if isinstance(each, ApplyChild)]
    gone = [f"{each.kind}/{each.name}" for each in actions if isinstance(each, DeleteChild)]
    return [*(each for each in applied if names.kind_of(each) in names.GANG_KINDS), *gone]


def turn(*plannings: Planning, seconds: float = 5) -> list[str]:
    """A round of each resource, then a step of every pod; names of the pods that gave their nodes back."""
    gone = []
    for planning in plannings:
        gone += deleted(planning.round())
        planning.cluster.start_all()
    for planning in plannings:
        planning.cluster.now += seconds
    return gone


def half_scheduled(nodes: Nodes, **spec: Any) -> Planning:
    """A group of two pods of which one gets the last node."""
    planning = planning_on(nodes, **TWO_PODS, **spec)
    nodes.count += 1
    planning.round()
    return planning


# --- gang objects


@pytest.mark.parametrize(
    ("gang", "served", "kind"),
    [
        ("Auto", (), None),
        ("Auto", SERVED, names.POD_GROUP),
        ("Auto", (names.WORKLOAD,), names.WORKLOAD),
        ("Auto", (names.VOLCANO_POD_GROUP,), None),
        ("Kubernetes", (names.WORKLOAD,), names.WORKLOAD),
        ("Kubernetes", (), names.POD_GROUP),
        ("SchedulerPlugins", SERVED, names.SCHEDULER_PLUGINS_POD_GROUP),
        ("Volcano", (), names.VOLCANO_POD_GROUP),
        ("None", SERVED, None),
    ],
)
def test_the_kind_follows_from_the_field_and_from_what_the_cluster_serves(
    gang: str, served: tuple[str, ...], kind: str | None
) -> None:
    assert gang_kind(parsed(scheduling={"gang": gang}, **TWO_PODS), served) == kind
    assert gang_kind(parsed(scheduling={"gang": gang}), served) is None


@pytest.mark.parametrize(
    ("gang", "served", "spec", "pod", "scheduler"),
    [
        (
            "Auto",
            (names.POD_GROUP,),
            {"schedulingPolicy": {"gang": {"minCount": 2}}},
            {"schedulingGroup": {"podGroupName": "chat-0-0"}},
            None,
        ),
        (
            "Auto",
            (names.WORKLOAD,),
            {"podGroups": [{"name": "pods", "policy": {"gang": {"minCount": 2}}}]},
            {"workloadRef": {"name": "chat-0-0", "podGroup": "pods"}},
            None,
        ),
        ("SchedulerPlugins", (), {"minMember": 2}, {}, "scheduler-plugins-scheduler"),
        ("Volcano", (), {"minMember": 2, "priorityClassName": "high"}, {}, "volcano"),
    ],
)
def test_an_attempt_has_a_gang_object_before_its_pods_and_they_refer_to_it(
    gang: str, served: tuple[str, ...], spec: dict[str, Any], pod: dict[str, Any], scheduler: str | None
) -> None:
    scheduling = {"gang": gang, "priorityClassName": "high"}
    actions = planning_on(Nodes(4), *served, scheduling=scheduling, **TWO_PODS).round()
    (manifest,) = gangs(actions)
    first = next(at for at, each in enumerate(actions) if isinstance(each, CreatePod))
    assert actions.index(ApplyChild(manifest)) < first
    assert (manifest["metadata"]["name"], manifest["spec"]) == ("chat-0-0", spec)
    assert manifest["metadata"]["ownerReferences"][0]["kind"] == "MegatronInference"
    for each in actions[first : first + 2]:
        assert isinstance(each, CreatePod)
        assert pod.items() <= each.manifest["spec"].items()
        assert each.manifest["spec"].get("schedulerName") == scheduler


def test_pods_refer_to_the_groups_of_schedulers_by_a_label_or_an_annotation() -> None:
    resource, identity = parsed(**TWO_PODS), PodIdentity(1, 3, 0, False, "hash", 0)
    plugins = render_pod(resource, identity, Settings(), names.SCHEDULER_PLUGINS_POD_GROUP)["metadata"]
    volcano = render_pod(resource, identity, Settings(), names.VOLCANO_POD_GROUP)["metadata"]
    assert plugins["labels"]["scheduling.x-k8s.io/pod-group"] == "chat-1-3"
    assert volcano["annotations"]["scheduling.k8s.io/group-name"] == "chat-1-3"


def test_a_gang_object_lives_as_long_as_the_pods_of_its_attempt() -> None:
    planning = planning_on(Nodes(8), names.POD_GROUP, replicas=2, **TWO_PODS).settled()
    kind = names.POD_GROUP
    assert {key for key in planning.cluster.children if kind in key} == {f"{kind}/chat-0-0", f"{kind}/chat-1-0"}
    planning.cluster.fail("chat-1-0-1")
    for _ in range(20):
        turn(planning)
    assert {key for key in planning.cluster.children if kind in key} == {f"{kind}/chat-0-0", f"{kind}/chat-1-1"}
    planning.spec["lifecycle"] = "Stopped"
    for _ in range(3):
        turn(planning)
    assert not any(kind in key for key in planning.cluster.children)


async def test_no_pod_is_created_without_the_gang_object_that_its_field_requires() -> None:
    operating = Operating(scheduling={"gang": "Volcano"}, **TWO_PODS)
    operating.cluster.refuses_kinds = {"PodGroup": KindMissing("PodGroup: install Volcano")}
    await begin(operating.obj, operating.cluster)
    result = await operating.round()
    assert (operating.cluster.pods, result.problems) == ({}, ("PodGroup: install Volcano",))
    ready = result.status.condition(ConditionType.READY)
    assert (ready.reason, ready.message) == ("ApplyFailed", "PodGroup: install Volcano")
    operating.cluster.refuses_kinds = {}
    await operating.settle()
    assert sorted(operating.cluster.pods) == ["chat-0-0-0", "chat-0-0-1"]


# --- without a gang


def test_two_resources_that_each_hold_half_of_the_nodes_complete_one_after_the_other() -> None:
    nodes = Nodes(0)
    plannings = [half_scheduled(nodes, name=name) for name in ("one", "two")]
    assert nodes.free == 0
    for _ in range(6 * TIMEOUT // 5):
        turn(*plannings)
        if any(planning.status.ready == "1/1" for planning in plannings):
            break
    done, other = sorted(plannings, key=lambda planning: planning.status.ready or "", reverse=True)
    assert (done.status.ready, done.status.restarts, other.status.restarts) == ("1/1", 0, 0)
    nodes.count = 4
    for _ in range(6 * TIMEOUT // 5):
        turn(*plannings)
    assert other.status.ready == "1/1"


def test_one_group_of_a_resource_gives_its_node_back_and_the_others_wait_for_their_turn() -> None:
    nodes = Nodes(3)
    planning = planning_on(nodes, replicas=3, **TWO_PODS)
    planning.round()
    # The scheduler does not place group after group.
    planning.cluster.change("chat-0-0-1", startup_since=None)
    planning.cluster.change("chat-2-0-0", startup_since=planning.cluster.now)
    held = {pod.group for pod in planning.cluster.pods.values() if pod.startup_since is not None}
    assert (held, nodes.free) == ({0, 1, 2}, 0)
    gave = []
    for _ in range(2 * TIMEOUT // 5 + 4):
        gave += turn(planning)
        if gave:
            break
    assert {name[:6] for name in gave} == {"chat-2"}
    for _ in range(3):
        assert turn(planning) == []
    assert planning.status.ready == "1/3"


def test_a_group_that_gave_its_nodes_back_pauses_and_restarts_without_a_count() -> None:
    nodes = Nodes(0)
    planning = half_scheduled(nodes)
    while not turn(planning):
        assert planning.cluster.now < 1_700_000_000 + 2 * TIMEOUT + 10
    assert planning.cluster.now > 1_700_000_000 + TIMEOUT
    gave_at = planning.cluster.now
    turn(planning)
    progress = planning.status.condition(ConditionType.PROGRESSING)
    assert progress.reason == "GangTimeout"
    assert "chat-0-0-0 gives its node back, because chat-0-0-1 found none within 10m" in progress.message
    nodes.count = 2
    actions: list[Action] = []
    while not created(actions):
        actions = planning.round()
        planning.cluster.start_all()
        planning.cluster.now += 5
    assert planning.cluster.now - gave_at >= GANG_PAUSE - 5
    assert (created(actions), restarts(actions)) == (["chat-0-1-0", "chat-0-1-1"], ["0", "0"])
    for _ in range(4):
        turn(planning)
    assert planning.status.ready == "1/1"


@pytest.mark.parametrize(("timeout", "scheduled"), [("0s", 1), ("10m", 0), ("10m", 2)])
def test_a_group_keeps_its_nodes_if_there_is_no_timeout_or_none_of_its_pods_waits_for_one(
    timeout: str, scheduled: int
) -> None:
    planning = planning_on(
        Nodes(scheduled), failurePolicy={"gangTimeout": timeout, "startupTimeout": "10h"}, **TWO_PODS
    )
    for _ in range(60):
        assert turn(planning, seconds=60) == []


def test_a_changed_timeout_restarts_no_pod() -> None:
    planning = Planning(**TWO_PODS).settled()
    planning.spec["failurePolicy"] = {"gangTimeout": "1m"}
    assert planning.round() == []
