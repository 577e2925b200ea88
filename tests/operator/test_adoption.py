"""Pods that ``kubectl delete --cascade=orphan`` left behind, and a new resource of the same name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planning_support.planning import Planning, deleted
from planning_support.resources import resource_object
from planning_support.simulation import SimulatedCluster

from megatron_operator.api.parse import parse_resource
from megatron_operator.names import VOLCANO_POD_GROUP
from megatron_operator.observed_state import Action, AdoptPod, ApplyChild, ObservedPod, ObservedState
from megatron_operator.plan import plan


class AfterOrphaning(SimulatedCluster):
    """A cluster with the pods and the Secret of a deleted resource."""

    def __init__(self, before: SimulatedCluster, *gang_kinds: str) -> None:
        super().__init__()
        self.orphans: dict[str, ObservedPod] = before.pods
        self.children = {key: text for key, text in before.children.items() if key.startswith("Secret/")}
        self.engine_state = before.engine_state
        self.gang_kinds = frozenset(gang_kinds)

    def observed(self) -> ObservedState:
        return replace(super().observed(), orphans=tuple(self.orphans.values()), gang_kinds=self.gang_kinds)

    def carry_out(self, action: Action) -> None:
        if isinstance(action, AdoptPod):
            self.pods[action.name] = self.orphans.pop(action.name)
        else:
            super().carry_out(action)


def created_again(*gang_kinds: str, **spec: Any) -> Planning:
    """A resource that was deleted without its pods, and created again: its status is empty."""
    planning = Planning(**spec)
    planning.cluster = AfterOrphaning(Planning(**spec).settled().cluster, *gang_kinds)
    return planning


def kinds(actions: list[Action]) -> list[type[Action]]:
    return [type(action) for action in actions]


def test_pods_without_an_owner_are_adopted_before_anything_else_and_serve_on() -> None:
    planning = created_again(replicas=2, parallelism={"tensor": 2})
    pods = planning.cluster.observed().orphans
    assert planning.look().requeue_after == 0
    first = planning.round()
    assert kinds(first) == [*[ApplyChild] * 3, *[AdoptPod] * 4]
    adopted = [action for action in first if isinstance(action, AdoptPod)]
    assert {(action.name, action.uid) for action in adopted} == {(pod.name, pod.uid) for pod in pods}
    assert {action.owner["uid"] for action in adopted} == {planning.resource.metadata.uid}
    planning.cluster.start_all()
    assert {pod.uid for pod in planning.settled().cluster.pods.values()} == {pod.uid for pod in pods}


def test_a_resource_that_is_deleted_without_its_pods_leaves_them_alone() -> None:
    planning = Planning().settled()
    obj = resource_object()
    obj["metadata"] |= {"deletionTimestamp": "2026-11-23T10:00:00Z", "finalizers": ["orphan"]}
    assert plan(parse_resource(obj), planning.cluster.observed()).actions == ()
    del obj["metadata"]["finalizers"]
    assert deleted(list(plan(parse_resource(obj), planning.cluster.observed()).actions)) == ["chat-0-0-0"]


def test_adopted_pods_with_another_template_are_replaced_by_a_rollout() -> None:
    planning = created_again()
    planning.spec["engine"] = {"maxRequests": 3}
    assert kinds(planning.round())[-1] is AdoptPod
    assert planning.settled().cluster.pods.keys() == {"chat-0-1-0"}


def test_pods_without_an_owner_end_when_the_resource_is_stopped() -> None:
    planning = created_again()
    planning.spec["lifecycle"] = "Stopped"
    planning.round()
    assert deleted(planning.round()) == ["chat-0-0-0"]


def test_the_gang_objects_of_adopted_pods_are_applied_too() -> None:
    spec = {"parallelism": {"tensor": 2}, "scheduling": {"gang": "Volcano"}}
    planning = created_again(VOLCANO_POD_GROUP, **spec)
    applied = [action.manifest["kind"] for action in planning.round() if isinstance(action, ApplyChild)]
    assert applied == ["Service", "Service", "Service", "PodGroup"]
