"""The operator as a program: permissions, restarts, metrics, and outages."""

import asyncio
from pathlib import Path

import pytest
from cluster_support.cluster import Cluster, wait_until
from cluster_support.control_plane import ControlPlane
from cluster_support.errors import CommandFailedError
from operator_support.fixtures import ACCOUNT, MANIFESTS, SYSTEM
from operator_support.operator_process import OperatorProcess, in_the_place_of
from operator_support.resource import Resource, manifest
from operator_support.scripted_node import ScriptedNode


async def test_an_operator_that_was_down_catches_up(
    chat: Resource, node: ScriptedNode, operator: OperatorProcess
) -> None:
    await chat.create(failurePolicy={"backoff": "0.5s"})
    await chat.until_phase("Running")
    assert await asyncio.to_thread(operator.stop) == 0
    await node.fail((await chat.pods())["chat-0-0-0"], 1, "a rank failed while no operator ran")
    await chat.kubectl("delete", "service", "chat")
    await chat.kubectl("scale", "mi", "chat", "--replicas=2")
    await asyncio.to_thread(operator.start)
    status = await chat.until(lambda status: status["ready"] == "2/2", "both groups")
    assert (set(node.launchers), status["restarts"]) == ({"chat-0-1-0", "chat-1-0-0"}, 1)
    assert (await chat.get("service", "chat"))["spec"]["ports"][0]["port"] == 8000


@pytest.mark.usefixtures("node", "controllers")
async def test_a_resource_can_be_deleted_while_no_operator_runs(chat: Resource, operator: OperatorProcess) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await asyncio.to_thread(operator.stop)
    await chat.kubectl("delete", "mi", "chat", "--timeout=30s")
    await chat.until_gone("pods", "services", "secrets")
    assert await chat.pods() == {}


def test_all_objects_of_the_kustomization_are_accepted(installed: Cluster) -> None:
    applied = installed.kubectl("apply", "--dry-run=server", "--validate=false", "-k", str(MANIFESTS))
    assert "deployment.apps/megatron-operator created" in applied


@pytest.mark.usefixtures("operator")
def test_the_role_grants_no_more_than_is_needed(installed: Cluster) -> None:
    kubeconfig = installed.kubeconfig_for(ACCOUNT, SYSTEM)
    for request in (("list", "secrets"), ("delete", "secrets"), ("delete", "megatroninferences"), ("patch", "nodes")):
        with pytest.raises(CommandFailedError, match="can-i"):
            installed.kubectl("auth", "can-i", *request, "--all-namespaces", kubeconfig=kubeconfig)


@pytest.mark.usefixtures("node")
async def test_metrics_count_the_resources_and_the_rounds(chat: Resource, operator: OperatorProcess) -> None:
    await chat.create()
    await chat.until_phase("Running")
    # A round counts when it ends, which is after it has written the status.
    for series, least in (
        ('megatron_operator_resources{phase="Running"}', 1),
        ('megatron_operator_reconciles_total{outcome="success"}', 2),
    ):
        await asyncio.to_thread(wait_until, lambda at=series, least=least: operator.metric(at) >= least, series)
        assert await asyncio.to_thread(operator.metric, series) >= least


@pytest.mark.usefixtures("node")
async def test_it_runs_under_the_kopf_command_too(
    chat: Resource, operator: OperatorProcess, installed: Cluster, tmp_path: Path
) -> None:
    other = OperatorProcess(installed.kubeconfig_for(ACCOUNT, SYSTEM), tmp_path / "operator.log", with_kopf=True)
    with in_the_place_of(operator, other):
        await chat.create()
        await chat.until_phase("Running")


@pytest.mark.usefixtures("node")
async def test_a_role_in_one_namespace_is_enough_to_serve_it(chat: Resource, confined: OperatorProcess) -> None:
    await chat.create()
    await chat.until_phase("Running")
    assert "forbidden" not in confined.log.read_text()


async def test_an_outage_of_the_api_server_ends_nothing(
    chat: Resource, node: ScriptedNode, own_control_plane: ControlPlane, operator: OperatorProcess
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await asyncio.to_thread(own_control_plane.restart_apiserver)
    await chat.kubectl("scale", "mi", "chat", "--replicas=2")
    await chat.until(lambda status: status["ready"] == "2/2", "both groups")
    assert set(node.launchers) == {"chat-0-0-0", "chat-1-0-0"}
    assert await asyncio.to_thread(operator.is_healthy)


@pytest.mark.usefixtures("node", "operator")
async def test_resources_of_one_namespace_do_not_affect_each_other(chat: Resource) -> None:
    other = Resource(chat.cluster, chat.namespace, "code")
    await chat.create()
    await other.apply(manifest("code"))
    await chat.until_phase("Running")
    await other.until_phase("Running")
    await chat.kubectl("delete", "mi", "chat")
    await chat.until_gone("pods")
    assert set(await other.pods()) == {"code-0-0-0"}
    assert (await other.status())["phase"] == "Running"
