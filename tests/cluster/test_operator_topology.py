"""Placement of the pods of a group by the real scheduler, and resource claims on an API server without them."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from cluster_support.cluster import Cluster
from cluster_support.control_plane import ControlPlane
from operator_support.api import Api, Json
from operator_support.resource import Resource, condition, manifest

from megatron_operator.api.parse import parse_resource
from megatron_operator.names import PodIdentity
from megatron_operator.render import render_pod
from megatron_operator.settings import Settings

RACK = "cloud.provider.com/topology-rack"
FIRST = PodIdentity(0, 0, 0, True, "hash", 0)
CLAIMS = [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]


@pytest.fixture(scope="module")
def scheduled(control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of its own, with the scheduler."""
    if not isinstance(control_plane, ControlPlane) or control_plane.binaries.scheduler is None:
        pytest.skip(f"{control_plane.description} has no kube-scheduler of its own")
    folder = tmp_path_factory.mktemp("scheduled")
    with ControlPlane(control_plane.binaries, control_plane.kubectl_path, folder, with_scheduler=True) as cluster:
        yield cluster


async def until(api: Api, path: str, is_so: Callable[[Json], bool]) -> Json:
    """The spec of an object, as soon as the condition holds for it."""
    while True:
        spec: Json = (await api.get(path))["spec"]
        if is_so(spec):
            return spec
        await asyncio.sleep(0.1)


async def add_node(api: Api, name: str, rack: str) -> None:
    """A node with room for one pod."""
    metadata = {"name": name, "labels": {RACK: rack, "kubernetes.io/hostname": name}}
    await api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    room = {"cpu": "1", "memory": "64Gi", "pods": "10", "ephemeral-storage": "10Gi"}
    ready = {"type": "Ready", "status": "True", "reason": "Simulated"}
    status = {"capacity": room, "allocatable": room, "conditions": [ready]}
    await api.merge(f"/api/v1/nodes/{name}/status", {"status": status})
    # A new node is tainted until the controller manager has seen its status; a preferred node would be passed over.
    await until(api, f"/api/v1/nodes/{name}", lambda spec: not spec.get("taints"))


async def node_of(api: Api, namespace: str, pod: str) -> str:
    """The node of the pod, as soon as it has one."""
    spec = await until(api, f"/api/v1/namespaces/{namespace}/pods/{pod}", lambda spec: bool(spec.get("nodeName")))
    return str(spec["nodeName"])


def pod_of(namespace: str, index: int, mode: str) -> Json:
    obj = manifest(
        parallelism={"tensor": 2},
        pods={"device": "cpu", "resources": {"requests": {"cpu": "800m"}}},
        scheduling={"groupTopology": {"key": RACK, "mode": mode}},
    )
    obj["metadata"] |= {"namespace": namespace, "uid": "u"}
    identity = replace(FIRST, index=index, leader=index == 0)
    pod: dict[str, Any] = render_pod(parse_resource(obj), identity, Settings())
    del pod["metadata"]["ownerReferences"]
    return pod


@pytest.mark.parametrize("mode", ["Required", "Preferred"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["leader first", "follower first"])
async def test_the_scheduler_places_a_group_in_one_rack_whichever_pod_comes_first(
    scheduled: ControlPlane, mode: str, order: tuple[int, int]
) -> None:
    namespace = scheduled.make_namespace()
    nodes = {f"{rack}-{number}-{namespace}": f"{rack}-{namespace}" for rack in "abc" for number in (1, 2)}
    async with Api(scheduled.kubeconfig) as api:
        for node, rack in nodes.items():
            await add_node(api, node, rack)
        placed = []
        for index in order:
            await api.post(f"/api/v1/namespaces/{namespace}/pods", pod_of(namespace, index, mode))
            placed.append(await node_of(api, namespace, f"chat-0-0-{index}"))
        first, second = placed
        assert first != second
        assert nodes[first] == nodes[second]
        for node in nodes:
            await api.delete(f"/api/v1/nodes/{node}")


@pytest.mark.usefixtures("node")
async def test_an_api_server_without_resource_claims_is_named_before_a_pod_is_created(chat: Resource) -> None:
    if int(chat.cluster.version.split(".")[1]) >= 34:
        pytest.skip(f"{chat.cluster.description} has resource claims")
    await chat.create(pods={"device": "cuda", "gpuAllocation": "ResourceClaims", "resourceClaims": CLAIMS})
    status = await chat.until_phase("Failed")
    words = condition(status, "Failed")["message"]
    assert words.startswith("spec.pods.resourceClaims: ")
    assert "this API server has no resource claims of pods; upgrade Kubernetes to 1.34" in words
    assert await chat.pods() == {}
