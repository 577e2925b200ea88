"""An outage of etcd, a namespace deleted with its resources, and resources deleted while they start."""

import asyncio
from collections.abc import Iterator

import pytest
from cluster_support.cluster import Cluster, wait_until
from cluster_support.control_plane import ControlPlane
from operator_support.operator_process import OperatorProcess
from operator_support.resource import Resource, manifest
from operator_support.scripted_node import ScriptedNode

ETCD_IS_AWAY = 20.0
"""Seconds; less than the grace period of the controllers for a silent node."""


def resources(operator: OperatorProcess) -> float:
    """The number of resources of the operator."""
    lines = operator.metrics().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("megatron_operator_resources{"))


async def until_forgotten(operator: OperatorProcess, others: float) -> None:
    """Waits until only the loops of ``others`` resources run."""
    await asyncio.to_thread(wait_until, lambda: resources(operator) <= others, "the operator to forget the resource")


async def test_an_outage_of_etcd_ends_nothing(
    chat: Resource, node: ScriptedNode, own_control_plane: ControlPlane, operator: OperatorProcess
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    (pod,) = (await chat.pods()).values()
    before = operator.log.read_text()
    await asyncio.to_thread(own_control_plane.stop_etcd)
    try:
        await asyncio.sleep(ETCD_IS_AWAY)
        assert await asyncio.to_thread(operator.is_healthy)
    finally:
        await asyncio.to_thread(own_control_plane.start_etcd)
        await asyncio.to_thread(own_control_plane.wait_until_ready)
    await chat.kubectl("scale", "mi", "chat", "--replicas=2")
    status = await chat.until(lambda status: status["ready"] == "2/2", "both groups")
    assert (set(node.launchers), status["restarts"]) == ({"chat-0-0-0", "chat-1-0-0"}, 0)
    assert (await chat.pods())["chat-0-0-0"]["metadata"]["uid"] == pod["metadata"]["uid"]
    assert "Traceback" not in operator.log.read_text().removeprefix(before)


@pytest.fixture
def elsewhere(installed: Cluster) -> Iterator[str]:
    """Another namespace."""
    name = installed.make_namespace()
    yield name
    installed.delete_namespace(name)


@pytest.mark.usefixtures("controllers")
async def test_a_namespace_that_is_deleted_with_a_resource_causes_no_errors(
    chat: Resource, node: ScriptedNode, own_control_plane: ControlPlane, operator: OperatorProcess, elsewhere: str
) -> None:
    await chat.create(replicas=2)
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    await asyncio.to_thread(own_control_plane.stop_controllers)
    try:
        # The namespace controller is stopped: the resource exists longer than its children until the test restarts it.
        await chat.kubectl("delete", "namespace", chat.namespace, "--wait=false")
        await chat.kubectl("delete", "service,networkpolicy,pod", "--all")
        await chat.until_phase("Terminating")
        await chat.until_pods()
        await chat.kubectl("annotate", "mi", "chat", "tests/look=again")
        other = Resource(chat.cluster, elsewhere)
        async with ScriptedNode(node.api, elsewhere):
            await other.create()
            await other.until_phase("Running")
        assert list((await chat.get("services"))["items"]) == []
    finally:
        await asyncio.to_thread(own_control_plane.start_controllers)
    await chat.kubectl("wait", "--for=delete", f"namespace/{chat.namespace}", "--timeout=50s")
    said = [line for line in operator.log.read_text().splitlines() if chat.namespace in line]
    assert [line for line in said if "WARNING" in line or "ERROR" in line] == []


@pytest.mark.usefixtures("controllers")
async def test_a_resource_that_is_deleted_while_it_starts_leaves_nothing(
    chat: Resource, stage: ScriptedNode, operator: OperatorProcess
) -> None:
    others = resources(operator)
    await chat.create(replicas=2)
    pods = await chat.until_pods("chat-0-0-0", "chat-1-0-0")
    await stage.run(pods["chat-0-0-0"])
    await chat.kubectl("delete", "mi", "chat", "--timeout=30s")
    await chat.until_gone("pods", "services", "secrets", "networkpolicies")
    await until_forgotten(operator, others)


@pytest.mark.usefixtures("controllers", "node")
async def test_resources_that_are_deleted_right_after_their_creation_leave_nothing(
    chat: Resource, operator: OperatorProcess
) -> None:
    others = resources(operator)
    names = [f"chat-{number}" for number in range(8)]
    listed = {"apiVersion": "v1", "kind": "List", "items": [manifest(name) for name in names]}
    await chat.apply(listed)
    await chat.kubectl("delete", "mi", *names, "--timeout=30s")
    for name in names:
        await Resource(chat.cluster, chat.namespace, name).until_gone("pods", "services", "secrets", "networkpolicies")
    await until_forgotten(operator, others)
