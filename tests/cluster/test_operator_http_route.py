"""The HTTPRoute of a resource, on clusters with the Gateway API, without it, and with an old version."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from cluster_support.cluster import Cluster
from cluster_support.control_plane import ControlPlane
from operator_support import gateway_api
from operator_support.resource import Json, Resource, condition

ROUTE = {
    "parentRefs": [{"name": "public", "namespace": "gateways", "sectionName": "https"}],
    "hostnames": ["chat.example.com"],
}


@pytest.fixture
def without_gateway_api(own_control_plane: ControlPlane) -> Iterator[Cluster]:
    """A cluster without the Gateway API; a given cluster keeps its own."""
    yield own_control_plane
    gateway_api.remove(own_control_plane)


@pytest.fixture
def with_gateway_api(without_gateway_api: Cluster) -> Cluster:
    gateway_api.install(without_gateway_api)
    return without_gateway_api


def hostnames(route: Json) -> list[str]:
    return list(route["spec"].get("hostnames", []))


async def route_that_others_changed_and_deleted(chat: Resource) -> Json:
    """The route after both changes were restored at once, which requires a watch."""
    patch = [{"op": "replace", "path": "/spec/hostnames", "value": ["wrong.example.com"]}]
    await chat.kubectl("patch", gateway_api.NAME, "chat", "--type=json", "-p", json.dumps(patch))
    await chat.until_found(gateway_api.NAME, "chat", lambda route: hostnames(route) == ["chat.example.com"])
    await chat.kubectl("delete", gateway_api.NAME, "chat")
    return await chat.until_found(gateway_api.NAME, "chat", lambda _: True)


@pytest.mark.usefixtures("node", "with_gateway_api")
async def test_a_route_is_created_changed_and_deleted_with_its_field(chat: Resource) -> None:
    await chat.create(expose={"httpRoute": ROUTE})
    await chat.until_phase("Running")
    route = await chat.until_found(gateway_api.NAME, "chat", lambda _: True)
    (parent,), (rule,) = route["spec"]["parentRefs"], route["spec"]["rules"]
    assert (parent["name"], parent["namespace"], parent["sectionName"]) == ("public", "gateways", "https")
    assert (rule["backendRefs"][0]["name"], rule["backendRefs"][0]["port"]) == ("chat", 8000)
    assert rule["timeouts"] == {"request": "0s"}
    await chat.patch({"expose": {"httpRoute": {"hostnames": ["b.example.com"], "requestTimeout": "1h30m"}}})
    route = await chat.until_found(gateway_api.NAME, "chat", lambda route: hostnames(route) == ["b.example.com"])
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "1h30m"}
    await chat.patch({"expose": {"httpRoute": None}})
    await chat.until_gone(gateway_api.NAME)


@pytest.mark.usefixtures("node")
async def test_a_cluster_without_the_gateway_api_serves_and_gets_the_route_later(
    chat: Resource, without_gateway_api: Cluster
) -> None:
    await chat.create(expose={"httpRoute": ROUTE})
    status = await chat.until_phase("Running")
    degraded = condition(status, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ApplyFailed")
    assert "no such kind in gateway.networking.k8s.io/v1; install the Gateway API" in degraded["message"]
    assert condition(status, "Ready")["status"] == "True"
    await chat.patch({"rollout": {"drainTimeout": "1s"}})
    await chat.until(lambda status: status["observedGeneration"] == 2, "another round")
    events = [event for event in await chat.events("ApplyFailed") if event["reason"] == "ApplyFailed"]
    assert len(events) == 1
    await asyncio.to_thread(gateway_api.install, without_gateway_api)
    await chat.until_found(gateway_api.NAME, "chat", lambda _: True)
    await chat.until(lambda status: condition(status, "Degraded")["status"] == "False", "all to be well")
    assert hostnames(await route_that_others_changed_and_deleted(chat)) == ["chat.example.com"]


@pytest.mark.usefixtures("node", "confined")
async def test_an_operator_that_may_not_watch_definitions_keeps_the_route(
    chat: Resource, without_gateway_api: Cluster
) -> None:
    """It also represents one that discovers the kind before the API server serves it, which happens rarely."""
    await asyncio.to_thread(gateway_api.install, without_gateway_api)
    await chat.create(expose={"httpRoute": ROUTE})
    await chat.until_found(gateway_api.NAME, "chat", lambda _: True)
    await chat.until_phase("Running")
    assert hostnames(await route_that_others_changed_and_deleted(chat)) == ["chat.example.com"]


@pytest.mark.usefixtures("node")
async def test_a_gateway_api_without_timeouts_is_reported_as_too_old(
    chat: Resource, without_gateway_api: Cluster
) -> None:
    await asyncio.to_thread(gateway_api.install, without_gateway_api, timeouts=False)
    await chat.create(expose={"httpRoute": ROUTE})
    # The operator may first report that it is missing, because the discovery of a CRD takes some time.
    old = "field not declared in schema"
    status = await chat.until(lambda status: old in condition(status, "Degraded").get("message", ""), "the refusal")
    assert "install the Gateway API, version 1.2 or newer" in condition(status, "Degraded")["message"]
    await chat.until_phase("Running")
