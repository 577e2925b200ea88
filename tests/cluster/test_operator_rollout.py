"""Rollouts on an API server: a surge without a gap, and a template that does not work."""

import asyncio
from pathlib import Path

from cluster_support.cluster import Cluster
from operator_support.fixtures import ACCOUNT, SYSTEM
from operator_support.operator_process import OperatorProcess, in_the_place_of
from operator_support.resource import Resource, condition, reason
from operator_support.scripted_node import ScriptedNode


async def test_a_rollout_on_cpus_runs_a_spare_group_first_and_removes_it_at_the_end(
    chat: Resource, stage: ScriptedNode
) -> None:
    await chat.create()
    first = (await chat.until_pods("chat-0-0-0"))["chat-0-0-0"]
    await stage.run(first)
    await stage.make_ready(first)
    await chat.until_phase("Running")
    await chat.patch({"restart": {"id": "now"}})
    spare = (await chat.until_pods("chat-0-0-0", "chat-1-0-0"))["chat-1-0-0"]
    await stage.run(spare)
    status = await chat.until(lambda status: reason(status, "Progressing") == "ModelLoading", "the spare group to load")
    assert (status["ready"], condition(status, "Ready")["status"]) == ("1/1", "True")
    await stage.make_ready(spare)
    second = (await chat.until_pods("chat-1-0-0", "chat-0-1-0"))["chat-0-1-0"]
    status = await chat.until(lambda status: status["leader"]["pod"] == "chat-1-0-0", "the spare group to lead")
    await stage.run(second)
    await stage.make_ready(second)
    await chat.until_pods("chat-0-1-0")
    status = await chat.until(lambda status: reason(status, "Progressing") == "Settled", "the end of the rollout")
    assert (status["ready"], len(status["replicaGroups"]), status["leader"]["pod"]) == ("1/1", 1, "chat-0-1-0")


async def test_an_image_that_cannot_be_pulled_stalls_the_rollout_and_the_previous_spec_ends_it(
    chat: Resource, stage: ScriptedNode
) -> None:
    await chat.create()
    first = (await chat.until_pods("chat-0-0-0"))["chat-0-0-0"]
    await stage.run(first)
    await stage.make_ready(first)
    await chat.until_phase("Running")
    await chat.patch({"image": "registry.example.com/broken:1"})
    spare = (await chat.until_pods("chat-0-0-0", "chat-1-0-0"))["chat-1-0-0"]
    await stage.wait_for_image(spare, "manifest unknown")
    status = await chat.until(lambda status: reason(status, "Degraded") == "RolloutStalled", "the stalled rollout")
    assert "registry.example.com/broken:1" in condition(status, "Degraded")["message"]
    assert condition(status, "Ready")["status"] == "True"
    await chat.patch({"image": None})
    pods = await chat.until_pods("chat-0-0-0")
    assert pods["chat-0-0-0"]["metadata"]["uid"] == first["metadata"]["uid"]
    status = await chat.until(lambda status: reason(status, "Degraded") == "AsExpected", "the end of the rollout")
    assert status["restarts"] == 0


async def test_an_operator_with_another_default_image_restarts_one_model_after_the_other(
    chat: Resource, node: ScriptedNode, operator: OperatorProcess, installed: Cluster, tmp_path: Path
) -> None:
    other = Resource(chat.cluster, chat.namespace, "other")
    for model in (chat, other):
        await model.create(rollout={"maxUnavailable": 1})
        await model.until(lambda status: reason(status, "Progressing") == "Settled", "the model")
    old = (await chat.status())["image"]
    image = "registry.example.com/runtime:2"
    kubeconfig = installed.kubeconfig_for(ACCOUNT, SYSTEM)
    newer = OperatorProcess(kubeconfig, tmp_path / "operator.log", settings={"MEGATRON_RUNTIME_IMAGE": image})
    node.by_itself = False
    with in_the_place_of(operator, newer):
        pods = await chat.until_pods("chat-0-1-0", within=90)
        # The first model does not become ready, so the second one waits.
        await asyncio.sleep(5)
        assert (set(await other.pods()), (await other.status())["image"]) == ({"other-0-0-0"}, old)
        assert await asyncio.to_thread(newer.metric, 'megatron_operator_fleet_rollout_resources{state="waiting"}') >= 1
        await node.run(pods["chat-0-1-0"])
        await node.make_ready(pods["chat-0-1-0"])
        (pod,) = (await other.until_pods("other-0-1-0")).values()
        assert pod["spec"]["containers"][0]["image"] == image
        assert (await chat.until(lambda status: status["image"] == image, "its image"))["ready"] == "1/1"
        events = [event["reason"] for event in await chat.events("ImageChanged", "ImageChanged")]
        assert events.count("ImageChanged") == 2
        for model in (chat, other):
            await model.kubectl("delete", "mi", model.name)
