"""Placement of pods by the real scheduler: a group in one rack, and pods with resource claims."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from cluster_support.cluster import Cluster
from cluster_support.control_plane import ControlPlane
from operator_support.api import Api, Json
from operator_support.resource import Resource, condition, manifest
from suite_support.kubernetes_schemas import check

from megatron_operator.api.parse import parse_resource
from megatron_operator.kubernetes.pod_status import observed_pod
from megatron_operator.names import PodIdentity
from megatron_operator.observed_state import Failure
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


DRA, DRIVER = "/apis/resource.k8s.io/v1", "gpu.tests"


def dra_object(kind: str, name: str, spec: Json) -> Json:
    return {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def one_gpu(node: str) -> dict[str, Json]:
    """What an administrator and a driver publish for a node with one device, by plural, and a template for it."""
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    devices = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}]}
    asked = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}}
    return {
        "deviceclasses": dra_object("DeviceClass", DRIVER, {"selectors": [selector]}),
        "resourceslices": dra_object("ResourceSlice", node, devices),
        "resourceclaimtemplates": dra_object("ResourceClaimTemplate", "one-gpu", {"spec": asked}),
    }


def test_the_objects_of_the_driver_and_the_pod_match_the_schemas() -> None:
    for obj in (*one_gpu("n1").values(), claiming_pod("default", 0)):
        check(obj, [f"1.{minor}" for minor in range(34, 38)])


def claiming_pod(namespace: str, group: int) -> Json:
    pods = {"device": "cuda", "gpuAllocation": "ResourceClaims", "resourceClaims": CLAIMS}
    obj = manifest(pods={**pods, "resources": {"requests": {"cpu": "100m"}}}, replicas=2)
    obj["metadata"] |= {"namespace": namespace, "uid": "u"}
    pod: dict[str, Any] = render_pod(parse_resource(obj), replace(FIRST, group=group), Settings())
    del pod["metadata"]["ownerReferences"]
    return pod


async def test_the_scheduler_allocates_a_device_to_one_pod_and_then_to_the_next(scheduled: ControlPlane) -> None:
    if scheduled.read(DRA) is None:
        pytest.skip(f"{scheduled.description} has no resource claims")
    namespace = scheduled.make_namespace()
    node, pods = f"gpus-{namespace}", f"/api/v1/namespaces/{namespace}/pods"
    async with Api(scheduled.kubeconfig) as api:
        await add_node(api, node, "a")
        objects = one_gpu(node)
        templates = f"namespaces/{namespace}/resourceclaimtemplates"
        await api.post(f"{DRA}/{templates}", objects.pop("resourceclaimtemplates"))
        for plural, obj in objects.items():
            await api.post(f"{DRA}/{plural}", obj)
        await api.post(pods, claiming_pod(namespace, 0))
        assert await node_of(api, namespace, "chat-0-0-0") == node
        (claim,) = await api.items(f"{DRA}/namespaces/{namespace}/resourceclaims")
        assert [each["device"] for each in claim["status"]["allocation"]["devices"]["results"]] == ["gpu-0"]
        await api.post(pods, claiming_pod(namespace, 1))
        while "cannot allocate" not in str(waiting := await waiting_for(api, f"{pods}/chat-1-0-0")):
            assert waiting is None or waiting.reason == "Unschedulable"
            await asyncio.sleep(0.1)
        await api.delete(f"{pods}/chat-0-0-0", gracePeriodSeconds=0)
        assert await node_of(api, namespace, "chat-1-0-0") == node


async def waiting_for(api: Api, pod: str) -> Failure | None:
    """What the operator reads from the pod."""
    observed = observed_pod(await api.get(pod))
    assert observed is not None
    return observed.waiting


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
