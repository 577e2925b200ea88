"""The operator with failed pods, invalid specs, and objects that other clients change."""

import asyncio
import json
from collections import Counter

import pytest
from cluster_support.cluster import Cluster
from cluster_support.errors import CommandFailedError
from operator_support.resource import Resource, condition, manifest, reason
from operator_support.scripted_node import ScriptedNode

from megatron_operator.timestamps import seconds

QUICK = {"backoff": "0.5s", "maxBackoff": "1s", "maxRestarts": 1}


async def test_a_failed_pod_is_followed_by_the_next_attempt_until_the_budget_is_spent(
    chat: Resource, stage: ScriptedNode
) -> None:
    await chat.create(failurePolicy=QUICK)
    first = (await chat.until_pods("chat-0-0-0"))["chat-0-0-0"]
    await stage.run(first)
    await stage.fail(first, 1, {"reason": "RankFailed", "message": "CUDA error", "rank": 3, "exitCode": 1})
    pods = await chat.until_pods("chat-0-1-0")
    # The pod is created before the status is written.
    status = await chat.until(lambda status: status["replicaGroups"][0].get("attempt") == 1, "the next attempt")
    (group,) = status["replicaGroups"]
    assert group["restarts"] == 1
    failure = group["lastFailure"]
    assert (failure["reason"], failure["message"], failure["rank"]) == ("RankFailed", "CUDA error", 3)
    await stage.run(pods["chat-0-1-0"])
    await stage.fail(pods["chat-0-1-0"], 137, "", reason="OOMKilled")
    status = await chat.until_phase("Failed")
    assert reason(status) == reason(status, "Failed") == "RestartBudgetExceeded"
    assert "memory" in condition(status, "Failed")["message"]
    expected = {"AttemptStarted": 2, "GroupFailed": 2, "RestartBudgetExceeded": 1}
    events = [event["reason"] for event in await chat.events(*Counter(expected).elements())]
    assert {each: events.count(each) for each in expected} == expected


async def test_the_startup_timeout_begins_when_a_pod_that_waited_is_scheduled(
    chat: Resource, stage: ScriptedNode
) -> None:
    stage.full = True
    await chat.create(failurePolicy={"maxRestarts": 0, "startupTimeout": "3s"})
    await chat.until_pods("chat-0-0-0")
    await asyncio.sleep(5)
    assert list(await chat.pods()) == ["chat-0-0-0"]
    stage.full = False
    status = await chat.until(lambda status: "lastFailure" in status["replicaGroups"][0], "the failure of attempt 0")
    failure = status["replicaGroups"][0]["lastFailure"]
    bound = condition((await stage.pod("chat-0-0-0"))["status"], "PodScheduled")["lastTransitionTime"]
    assert (failure["attempt"], failure["reason"]) == (0, "StartupTimeout")
    assert seconds(failure["time"]) == seconds(bound) + 3


async def test_a_pod_that_the_cluster_preempts_does_not_use_up_the_restart_budget(
    chat: Resource, stage: ScriptedNode
) -> None:
    await chat.create(failurePolicy={**QUICK, "maxRestarts": 0})
    for attempt in range(3):
        pod = (await chat.until_pods(f"chat-0-{attempt}-0"))[f"chat-0-{attempt}-0"]
        await stage.run(pod)
        await stage.make_ready(pod)
        await chat.until_phase("Running")
        await stage.preempt(pod)
    await chat.until_pods("chat-0-3-0")
    status = await chat.until(lambda status: status["replicaGroups"][0].get("attempt") == 3, "the next attempt")
    (group,) = status["replicaGroups"]
    assert (status["restarts"], group["lastFailure"]["reason"]) == (0, "Preempting")
    assert group["lastFailure"]["disruption"] is True


async def test_the_pods_of_a_group_are_replaced_together(chat: Resource, stage: ScriptedNode) -> None:
    await chat.create(parallelism={"tensor": 3, "pipeline": 2}, pods={"device": "cpu", "ranksPerPod": 4})
    first = await chat.until_pods("chat-0-0-0", "chat-0-0-1")
    for pod in first.values():
        await stage.run(pod)
        await stage.make_ready(pod)
    status = await chat.until(lambda status: status.get("ready") == "1/1", "both pods")
    assert (status["replicaGroups"][0]["readyPods"], status["replicaGroups"][0]["totalPods"]) == (2, 2)
    stage.by_itself = True
    killed = {"reason": "RankFailed", "message": "rank 5 was ended by SIGKILL", "rank": 5, "exitCode": -9}
    await stage.fail(first["chat-0-0-1"], 1, killed)
    await chat.until_pods("chat-0-1-0", "chat-0-1-1")
    status = await chat.until(lambda status: status.get("ready") == "1/1", "the next attempt")
    (group,) = status["replicaGroups"]
    assert (group["attempt"], group["restarts"]) == (1, 1)
    assert (group["lastFailure"]["pod"], group["lastFailure"]["rank"]) == ("chat-0-0-1", 5)


async def test_invalid_input_is_not_retried_until_the_spec_changes(chat: Resource, stage: ScriptedNode) -> None:
    await chat.create(failurePolicy=QUICK)
    pod = (await chat.until_pods("chat-0-0-0"))["chat-0-0-0"]
    await stage.run(pod)
    words = "/models/m.gguf: not found; mount the model there, or correct spec.model.source.path"
    await stage.fail(pod, 2, {"reason": "CheckpointError", "message": words, "exitCode": 2})
    status = await chat.until_phase("Failed")
    assert reason(status, "Failed") == "CheckpointError"
    assert words in condition(status, "Failed")["message"]
    stage.by_itself = True
    await chat.patch({"model": {"source": {"path": "/models/other.gguf"}}})
    status = await chat.until_phase("Running")
    assert condition(status, "Failed")["status"] == "False"


@pytest.mark.usefixtures("node")
async def test_a_spec_that_cannot_be_served_is_reported_with_field_value_and_remedy(
    chat: Resource, installed: Cluster
) -> None:
    """An API server with CEL rejects it at once; an older one leaves that to the operator."""
    two = {"path": "/models/m.gguf", "huggingFace": {"repo": "org/model"}}
    if installed.knows_cel:
        with pytest.raises(CommandFailedError, match=r"spec\.model\.source"):
            await chat.apply(manifest(model={"source": two}))
        return
    await chat.apply(manifest(model={"source": two}))
    status = await chat.until_phase("Failed")
    assert reason(status, "Failed") == "InvalidSpec"
    assert "spec.model.source" in condition(status, "Failed")["message"]
    assert await chat.pods() == {}
    await chat.patch({"model": {"source": {"huggingFace": None}}})
    status = await chat.until_phase("Running")
    assert condition(status, "Failed")["status"] == "False"


async def test_a_model_in_an_image_is_refused_if_the_cluster_would_drop_the_volume(
    chat: Resource, installed: Cluster, node: ScriptedNode
) -> None:
    await chat.create(model={"source": {"image": {"reference": "registry/m:1"}}})
    if installed.knows_image_volumes:
        await chat.until_phase("Running")
        return
    words = "image registry/m:1: this API server has no volumes of type image"
    status = await chat.until(lambda status: words in condition(status, "Ready").get("message", ""), "the refusal")
    assert (reason(status), node.launchers, await chat.pods()) == ("ApplyFailed", {}, {})
    events = [event for event in await chat.events("ApplyFailed") if words in event["message"]]
    assert [event["reason"] for event in events] == ["ApplyFailed"]
    await chat.patch({"model": {"source": {"image": None, "path": "/models/m.gguf"}}})
    await chat.until_phase("Running")


@pytest.mark.usefixtures("node")
async def test_a_service_that_a_user_deletes_is_restored(chat: Resource) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await chat.kubectl("delete", "service", "chat-coordinator")
    service = await chat.until_found("service", "chat-coordinator", lambda _: True)
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


@pytest.mark.usefixtures("node")
async def test_a_field_of_a_child_that_a_user_changes_is_restored(chat: Resource) -> None:
    await chat.create()
    await chat.until_phase("Running")
    wrong = {"app": "another"}
    patch = [{"op": "replace", "path": "/spec/selector", "value": wrong}]
    await chat.kubectl("patch", "service", "chat", "--type=json", "-p", json.dumps(patch))
    ours = {"inference.megatron.dev/name": "chat", "inference.megatron.dev/index": "0"}
    service = await chat.until_found("service", "chat", lambda service: service["spec"]["selector"] != wrong)
    assert ours.items() <= service["spec"]["selector"].items()


@pytest.mark.usefixtures("node")
async def test_fields_that_others_add_to_a_child_stay(chat: Resource) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await chat.kubectl("annotate", "service", "chat", "team=vision")
    await chat.patch({"expose": {"service": {"type": "NodePort"}}})
    service = await chat.until_found("service", "chat", lambda service: service["spec"]["type"] == "NodePort")
    assert service["metadata"]["annotations"]["team"] == "vision"
    managers = {entry["manager"]: entry["operation"] for entry in service["metadata"]["managedFields"]}
    assert managers["megatron-operator"] == "Apply"


@pytest.mark.usefixtures("node")
async def test_a_service_of_another_owner_is_never_adopted(chat: Resource) -> None:
    stranger = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"}, "spec": {"ports": [{"port": 80}]}}
    await chat.apply(stranger)
    await chat.create()
    words = "Service chat exists and has another owner"
    await chat.until(lambda status: words in json.dumps(status.get("conditions", [])), "the refusal in a condition")
    service = await chat.get("service", "chat")
    assert [port["port"] for port in service["spec"]["ports"]] == [80]
    await chat.kubectl("delete", "service", "chat")
    await chat.until_phase("Running", within=90)


async def test_a_leader_that_does_not_answer_is_reported_and_recovers(chat: Resource, node: ScriptedNode) -> None:
    await chat.create()
    await chat.until_phase("Running")
    launcher = node.launchers["chat-0-0-0"]
    await launcher.stop()
    status = await chat.until(lambda status: reason(status) == "EngineUnreachable", "EngineUnreachable")
    assert condition(status, "Ready")["status"] == "Unknown"
    await launcher.start()
    await chat.until_phase("Running")


async def test_a_failed_group_does_not_affect_the_other(chat: Resource, node: ScriptedNode) -> None:
    await chat.create(replicas=2, failurePolicy={**QUICK, "backoff": "5s", "maxBackoff": "5s"})
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    await node.fail((await chat.pods())["chat-1-0-0"], 1, "Segmentation fault")
    status = await chat.until_phase("Degraded")
    assert (condition(status, "Ready")["status"], condition(status, "Degraded")["status"]) == ("True", "True")
    await chat.until(lambda status: status["ready"] == "2/2", "the next attempt")
    assert set(node.launchers) == {"chat-0-0-0", "chat-1-1-0"}


@pytest.mark.usefixtures("node")
async def test_a_resource_with_the_name_of_a_service_of_another_one_is_not_ready_and_has_no_pods(
    chat: Resource,
) -> None:
    other = Resource(chat.cluster, chat.namespace, "chat-pods")
    await chat.create()
    await chat.until_phase("Running")
    await other.create()
    status = await other.until(lambda status: reason(status) == "NameTaken", "the refusal")
    assert "Service chat-pods has another owner" in condition(status, "Ready")["message"]
    assert "url" not in status
    assert await other.pods() == {}
    assert (await chat.status())["phase"] == "Running"


@pytest.mark.usefixtures("node")
async def test_a_pod_template_is_checked_before_a_pod_is_replaced_and_what_it_removes_stays_removed(
    chat: Resource,
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await chat.patch({"podTemplate": {"spec": {"nodeSelektor": {"gpu": "a"}}}})
    status = await chat.until(lambda status: reason(status, "Failed") == "InvalidSpec", "the refusal")
    assert "spec.podTemplate.spec.nodeSelektor" in condition(status, "Failed")["message"]
    assert list(await chat.pods()) == ["chat-0-0-0"]
    await chat.patch({"podTemplate": {"spec": None, "remove": ["securityContext.runAsUser"]}})
    pod = (await chat.until_pods("chat-0-1-0"))["chat-0-1-0"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"].get("runAsUser") is None
