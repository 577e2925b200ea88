"""Drains of nodes: evictions wait for the successor on another node, or for the drain without room."""

import asyncio
import json
from http import HTTPStatus

import pytest
from operator_support.api import Api, ApiFailure
from operator_support.operator_process import OperatorProcess
from operator_support.resource import Json, Resource, reason
from operator_support.scripted_node import ScriptedNode

FIRST, SPARE, SECOND = "chat-0-0-0", "chat-1-0-0", "chat-0-1-0"


async def allowed_evictions(chat: Resource, count: int) -> Json:
    """The budget, as soon as it permits this number of evictions."""
    while True:
        found = json.loads(await chat.kubectl("get", "poddisruptionbudgets", "-o", "json"))["items"]
        if any(each.get("status", {}).get("disruptionsAllowed") == count for each in found):
            return dict(found[0])
        await asyncio.sleep(0.2)


async def evict(api: Api, budget: Json, pod: Json) -> HTTPStatus:
    """What the eviction API answers."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    eviction = {"apiVersion": budget["apiVersion"], "kind": "Eviction", "metadata": {"name": name}}
    try:
        await api.post(f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", eviction)
    except ApiFailure as failure:
        return HTTPStatus(failure.status)
    return HTTPStatus.CREATED


async def serving(chat: Resource, stage: ScriptedNode, **spec: object) -> Json:
    """The only pod of a resource that runs on the node of ``stage``, which takes no other pods."""
    stage.refused = {SPARE, SECOND}
    await chat.create(**spec)
    pod = (await chat.until_pods(FIRST))[FIRST]
    await stage.run(pod)
    await stage.make_ready(pod)
    await chat.until_phase("Running")
    return pod


async def start(node: ScriptedNode, pod: Json) -> None:
    await node.run(pod)
    await node.make_ready(pod)


@pytest.mark.usefixtures("controllers")
async def test_evictions_wait_until_a_successor_on_another_node_is_ready(
    chat: Resource, stage: ScriptedNode, api: Api
) -> None:
    first = await serving(chat, stage)
    budget = await allowed_evictions(chat, 0)
    assert budget["spec"]["minAvailable"] == 1
    assert budget["metadata"]["ownerReferences"][0]["uid"] == (await chat.get("mi", "chat"))["metadata"]["uid"]
    assert await evict(api, budget, first) is HTTPStatus.TOO_MANY_REQUESTS
    async with ScriptedNode(api, chat.namespace, by_itself=False) as other:
        await chat.kubectl("cordon", stage.name)
        spare = (await chat.until_pods(FIRST, SPARE))[SPARE]
        await chat.until(lambda status: reason(status, "Progressing") == "NodeCordoned", "the cordon")
        await start(other, spare)
        second = (await chat.until_pods(SPARE, SECOND))[SECOND]
        await start(other, second)
        pods = await chat.until_pods(SECOND)
        assert pods[SECOND]["spec"]["nodeName"] == other.name
        await chat.until(lambda status: reason(status, "Progressing") == "Settled", "the end of the move")
        assert "NoRoomForSuccessor" not in {event["reason"] for event in await chat.events("NodeCordoned")}


async def test_without_room_the_pod_drains_and_an_event_says_so(chat: Resource, stage: ScriptedNode, api: Api) -> None:
    await serving(chat, stage, disruption={"schedulingTimeout": "1s"})
    await chat.kubectl("cordon", stage.name)
    second = (await chat.until_pods(SECOND))[SECOND]
    await chat.events("NoRoomForSuccessor")
    await stage.find_no_place(second, "0/1 nodes are available: 1 node was unschedulable")
    await chat.until(lambda status: reason(status, "Progressing") == "Unschedulable", "the missing room")
    async with ScriptedNode(api, chat.namespace) as other:
        await chat.until(lambda status: reason(status, "Progressing") == "Settled", "the next attempt")
        assert (await chat.pods())[SECOND]["spec"]["nodeName"] == other.name


async def test_a_node_that_is_uncordoned_keeps_its_pod(chat: Resource, stage: ScriptedNode) -> None:
    await serving(chat, stage)
    await chat.kubectl("cordon", stage.name)
    await chat.until_pods(FIRST, SPARE)
    await chat.kubectl("uncordon", stage.name)
    pods = await chat.until_pods(FIRST)
    assert "deletionTimestamp" not in pods[FIRST]["metadata"]


@pytest.mark.usefixtures("controllers")
async def test_an_operator_that_may_not_read_nodes_permits_evictions(
    chat: Resource, stage: ScriptedNode, api: Api, confined: OperatorProcess
) -> None:
    first = await serving(chat, stage)
    budget = await allowed_evictions(chat, 1)
    assert await evict(api, budget, first) is HTTPStatus.CREATED
    await chat.until_pods(SECOND)
    assert "nodes cannot be read" in confined.log.read_text()
