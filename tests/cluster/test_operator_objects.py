"""The operator's objects, as stored by an API server, are valid on each version of Kubernetes."""

import asyncio
import json
from pathlib import Path

import pytest
from cluster_support.cluster import Cluster, wait_until
from operator_support.fixtures import ACCOUNT, SYSTEM
from operator_support.operator_process import OperatorProcess, in_the_place_of
from operator_support.resource import Json, Resource, reason
from operator_support.scripted_node import ScriptedNode
from suite_support.kubernetes_schemas import check

KINDS = {
    "pods": "Pod",
    "services": "Service",
    "secrets": "Secret",
    "ingresses.v1.networking.k8s.io": "Ingress",
    "events.v1.events.k8s.io": "Event",
}
LEASE = "megatron-operator"
"""The only Lease that the operator's role permits."""


async def made(chat: Resource, plural: str, kind: str) -> list[Json]:
    """The objects of a kind that belong to the resource."""
    found = json.loads(await chat.kubectl("get", plural, "-o", "json"))["items"]
    if kind == "Event":
        return [each for each in found if each["regarding"]["kind"] == "MegatronInference"]
    return [each for each in found if each["metadata"].get("ownerReferences")]


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("spec", [{}, {"parallelism": {"tensor": 2}}], ids=["one pod", "two pods"])
async def test_the_children_of_a_resource_are_valid_on_each_version(chat: Resource, spec: Json) -> None:
    await chat.create(replicas=2, expose={"ingress": {"host": "chat.example.com"}}, **spec)
    await chat.until_phase("Running")
    for plural, kind in KINDS.items():
        objects = await made(chat, plural, kind)
        assert objects, kind
        for each in objects:
            check(each)


@pytest.mark.usefixtures("chat")
async def test_the_lease_of_the_operator_is_valid_on_each_version(
    operator: OperatorProcess, installed: Cluster, tmp_path: Path
) -> None:
    kubeconfig = installed.kubeconfig_for(ACCOUNT, SYSTEM)
    settings = {"MEGATRON_OPERATOR_LEASE": f"{SYSTEM}/{LEASE}"}
    with in_the_place_of(operator, OperatorProcess(kubeconfig, tmp_path / "operator.log", settings=settings)):
        there = ("lease", LEASE, "-n", SYSTEM)
        await asyncio.to_thread(wait_until, lambda: installed.exists(*there), "the Lease")
        check(await asyncio.to_thread(installed.get, *there))


async def test_a_large_resource_gets_all_of_its_pods_once_in_steps_that_leave_time_for_others(
    chat: Resource, stage: ScriptedNode
) -> None:
    stage.full = True
    large = Resource(chat.cluster, chat.namespace, "large")
    await large.create(parallelism={"tensor": 300})
    await chat.create()
    await chat.until_pods("chat-0-0-0")
    expected = {f"large-0-0-{index}" for index in range(300)}
    await large.until_pods(*expected, within=120)
    assert reason(await large.until(lambda status: status.get("replicas") == 1, "the group")) == "Pending"
    await large.patch({"lifecycle": "Stopped"})
    await large.until_phase("Stopped", within=120)
