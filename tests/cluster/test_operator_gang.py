"""Groups of several pods on an API server: objects of gang schedulers, and nodes that are given back without one."""

import asyncio
from collections.abc import Iterator

import pytest
from cluster_support.control_plane import ControlPlane
from operator_support import gang_api
from operator_support.resource import Json, Resource, condition, reason
from operator_support.scripted_node import ScriptedNode

from megatron_operator import names

PLUGINS, NATIVE = names.SCHEDULER_PLUGINS_POD_GROUP, names.POD_GROUP
TWO_PODS = {"parallelism": {"tensor": 2}}


@pytest.fixture
def gang_cluster(own_control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """A cluster without gang scheduling; what the test installs is removed."""
    yield own_control_plane
    for kind in (PLUGINS, NATIVE):
        gang_api.remove(own_control_plane, kind)


async def gangs(chat: Resource, kind: str) -> dict[str, Json]:
    """The specs of the gang objects, by name."""
    items = (await chat.get(gang_api.plural(kind)))["items"]
    return {each["metadata"]["name"]: each["spec"] for each in items}


async def until_gangs(chat: Resource, kind: str, *expected: str) -> None:
    while set(await gangs(chat, kind)) != set(expected):  # noqa: ASYNC110  # nothing reports it
        await asyncio.sleep(0.2)


@pytest.mark.usefixtures("node")
async def test_pods_wait_for_the_kind_of_their_gang_and_its_objects_come_and_go_with_their_attempts(
    chat: Resource, gang_cluster: ControlPlane
) -> None:
    await chat.create(scheduling={"gang": "SchedulerPlugins"}, **TWO_PODS)
    status = await chat.until(lambda status: reason(status, "Ready") == "ApplyFailed", "the missing kind")
    assert (
        "no such kind in scheduling.x-k8s.io/v1alpha1; install scheduler-plugins"
        in condition(status, "Ready")["message"]
    )
    assert await chat.pods() == {}
    await asyncio.to_thread(gang_api.install, gang_cluster, PLUGINS)
    pods = await chat.until_pods("chat-0-0-0", "chat-0-0-1")
    assert await gangs(chat, PLUGINS) == {"chat-0-0": {"minMember": 2}}
    for pod in pods.values():
        assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == "chat-0-0"
        assert pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler"
    await chat.until_phase("Running")
    await chat.patch({"restart": {"id": "now"}, "rollout": {"maxUnavailable": 1}})
    await chat.until_pods("chat-0-1-0", "chat-0-1-1")
    await asyncio.wait_for(until_gangs(chat, PLUGINS, "chat-0-1"), 30)
    await chat.patch({"lifecycle": "Stopped"})
    await asyncio.wait_for(until_gangs(chat, PLUGINS), 30)


@pytest.mark.usefixtures("node")
async def test_the_pod_groups_of_kubernetes_have_the_size_of_the_replica_group(
    chat: Resource, gang_cluster: ControlPlane
) -> None:
    await asyncio.to_thread(gang_api.install, gang_cluster, NATIVE)
    await chat.create(scheduling={"gang": "Kubernetes"}, **TWO_PODS)
    await chat.until_phase("Running")
    assert await gangs(chat, NATIVE) == {"chat-0-0": {"schedulingPolicy": {"gang": {"minCount": 2}}}}


async def test_a_group_whose_other_pod_finds_no_node_gives_its_node_back(chat: Resource, stage: ScriptedNode) -> None:
    stage.refused = {"chat-0-0-1"}
    await chat.create(failurePolicy={"gangTimeout": "2s"}, **TWO_PODS)
    status = await chat.until(lambda status: reason(status, "Progressing") == "GangTimeout", "the nodes given back")
    assert "chat-0-0-1 found none within 2s" in condition(status, "Progressing")["message"]
    await chat.until_pods()
    (group,) = (await chat.status())["replicaGroups"]
    assert (group["attempt"], group["restarts"], group["lastFailure"]["disruption"]) == (0, 0, True)
