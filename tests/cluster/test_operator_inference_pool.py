"""The InferencePool of a resource, on clusters with the Gateway API Inference Extension and without it."""

import asyncio
from collections.abc import Iterator

import pytest
from cluster_support.cluster import Cluster
from cluster_support.control_plane import ControlPlane
from operator_support import gateway_api, inference_extension
from operator_support.resource import Json, Resource, condition

POOL = {"endpointPicker": {"name": "chat-epp"}}


@pytest.fixture
def without_extension(own_control_plane: ControlPlane) -> Iterator[Cluster]:
    """A cluster without the extension, and with the Gateway API."""
    gateway_api.install(own_control_plane)
    yield own_control_plane
    inference_extension.remove(own_control_plane)
    gateway_api.remove(own_control_plane)


def backend_of(route: Json) -> Json:
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    return {key: backend.get(key) for key in ("group", "kind", "name", "port")}


@pytest.mark.usefixtures("node")
async def test_a_pool_is_created_changed_and_deleted_with_its_field(chat: Resource, without_extension: Cluster) -> None:
    await asyncio.to_thread(inference_extension.install, without_extension)
    await chat.create(expose={"inferencePool": POOL, "httpRoute": {"parentRefs": [{"name": "public"}]}})
    await chat.until_phase("Running")
    pool = await chat.until_found(inference_extension.NAME, "chat", lambda _: True)
    picker = {"group": "", "kind": "Service", "name": "chat-epp", "port": {"number": 9002}, "failureMode": "FailClose"}
    assert pool["spec"]["endpointPickerRef"] == picker
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    (pod,) = (await chat.pods()).values()
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    route = await chat.until_found(gateway_api.NAME, "chat", lambda _: True)
    to_pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "chat", "port": None}
    assert backend_of(route) == to_pool
    changed = {"endpointPicker": {"port": 9003, "failureMode": "FailOpen"}, "annotations": {"team": "a"}}
    await chat.patch({"expose": {"inferencePool": changed}})
    pool = await chat.until_found(
        inference_extension.NAME, "chat", lambda pool: pool["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
    )
    assert (pool["spec"]["endpointPickerRef"]["port"], pool["metadata"]["annotations"]["team"]) == (
        {"number": 9003},
        "a",
    )
    await chat.kubectl("delete", inference_extension.NAME, "chat")
    await chat.until_found(inference_extension.NAME, "chat", lambda _: True)
    await chat.patch({"expose": {"inferencePool": None}})
    await chat.until_gone(inference_extension.NAME)
    to_service = {"group": "", "kind": "Service", "name": "chat", "port": 8000}
    await chat.until_found(gateway_api.NAME, "chat", lambda route: backend_of(route) == to_service)


@pytest.mark.usefixtures("node")
async def test_a_cluster_without_the_extension_serves_and_gets_the_pool_later(
    chat: Resource, without_extension: Cluster
) -> None:
    await chat.create(expose={"inferencePool": POOL})
    status = await chat.until_phase("Running")
    degraded = condition(status, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ApplyFailed")
    assert "install the Gateway API Inference Extension, version 1.0 or newer" in degraded["message"]
    assert condition(status, "Ready")["status"] == "True"
    await asyncio.to_thread(inference_extension.install, without_extension)
    await chat.until_found(inference_extension.NAME, "chat", lambda _: True)
    await chat.until(lambda status: condition(status, "Degraded")["status"] == "False", "all to be well")
