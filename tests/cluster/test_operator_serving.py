"""The operator starts a resource, reports its status, and follows changes of the spec."""

import asyncio
import time

import pytest
from cluster_support.cluster import Cluster
from cluster_support.errors import CommandFailedError
from operator_support.resource import Resource, condition, manifest, reason
from operator_support.scripted_node import ScriptedNode

OURS = "inference.megatron.dev/name=chat"


async def test_a_resource_becomes_pods_services_and_a_secret_and_is_ready(chat: Resource, node: ScriptedNode) -> None:
    await chat.create(replicas=2)
    status = await chat.until_phase("Running")
    assert status["engineState"] == "RUNNING"
    status = await chat.until(lambda status: status["ready"] == "2/2", "both groups")
    assert (status["replicas"], status["readyReplicas"], status["observedGeneration"]) == (2, 2, 1)
    assert status["url"] == f"http://chat.{chat.namespace}.svc:8000/v1"
    assert (condition(status, "Ready")["status"], reason(status)) == ("True", "EngineRunning")
    assert set(await chat.pods()) == {"chat-0-0-0", "chat-1-0-0"}
    assert set(node.launchers) == {"chat-0-0-0", "chat-1-0-0"}
    services = await chat.get("services", selector=OURS)
    assert {each["metadata"]["name"] for each in services["items"]} == {"chat", "chat-coordinator", "chat-pods"}
    secret = await chat.get("secret", "chat-keys")
    assert set(secret["data"]) == {"coordinator-key", "control-token"}


@pytest.mark.usefixtures("node")
async def test_every_child_has_its_owner_and_kopf_adds_no_annotations(chat: Resource) -> None:
    await chat.create()
    await chat.until_phase("Running")
    owner = await chat.get("mi", "chat")
    assert "finalizers" not in owner["metadata"]
    assert set(owner["metadata"].get("annotations", {})) <= {"kubectl.kubernetes.io/last-applied-configuration"}
    for kind in ("pods", "services", "secrets"):
        for child in (await chat.get(kind, selector=OURS))["items"]:
            (reference,) = child["metadata"]["ownerReferences"]
            assert (reference["uid"], reference["controller"]) == (owner["metadata"]["uid"], True)


async def test_each_stage_of_a_start_is_in_the_status(chat: Resource, stage: ScriptedNode) -> None:
    stage.full = True
    await chat.create()
    pod = (await chat.until_pods("chat-0-0-0"))["chat-0-0-0"]
    await stage.find_no_place(pod, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    status = await chat.until(lambda status: reason(status) == "Unschedulable", "Unschedulable")
    assert "Insufficient nvidia.com/gpu" in condition(status, "Ready")["message"]
    assert status["phase"] == "Pending"
    stage.full = False
    await stage.wait_for_image(pod, 'Back-off pulling image "registry/none"')
    await stage.api.merge(f"{stage.pods_path}/chat-0-0-0/status", {"status": {"conditions": None}})
    status = await chat.until(lambda status: reason(status) == "ImagePull", "ImagePull")
    assert "Back-off" in condition(status, "Ready")["message"]
    launcher = await stage.run(pod)
    status = await chat.until(lambda status: reason(status) == "ModelLoading", "ModelLoading")
    assert (status["phase"], "10 %" in condition(status, "Ready")["message"]) == ("Starting", True)
    launcher.load(60, 100)
    await chat.until(lambda status: "60 %" in condition(status, "Ready")["message"], "progress without any event")
    await stage.make_ready(pod)
    status = await chat.until_phase("Running")
    assert status["replicaGroups"][0]["readyPods"] == 1


@pytest.mark.usefixtures("node")
async def test_kubectl_shows_the_columns_and_waits_for_conditions(chat: Resource) -> None:
    await chat.create()
    await chat.kubectl("wait", "--for=condition=Ready", "mi/chat", "--timeout=60s")
    header, row = (line.split() for line in (await chat.kubectl("get", "mi")).splitlines())
    assert header == ["NAME", "PHASE", "ENGINE", "READY", "URL", "RESTARTS", "AGE"]
    assert row[:6] == ["chat", "Running", "RUNNING", "1/1", f"http://chat.{chat.namespace}.svc:8000/v1", "0"]
    wide = (await chat.kubectl("get", "megatroninferences", "-o", "wide")).splitlines()
    assert wide[0].split()[-2:] == ["MODEL", "REASON"]
    assert wide[1].split()[-2:] == ["chat", "EngineRunning"]


async def test_kubectl_scale_adds_and_removes_groups(chat: Resource, node: ScriptedNode) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await chat.kubectl("scale", "mi", "chat", "--replicas=3")
    await chat.until(lambda status: status["ready"] == "3/3", "three groups")
    assert (await chat.get("mi", "chat"))["spec"]["replicas"] == 3
    await chat.kubectl("scale", "mi", "chat", "--replicas=1")
    await chat.until_pods("chat-0-0-0")
    await chat.until(lambda status: (status["ready"], status["replicas"]) == ("1/1", 1), "one group")
    assert set(node.launchers) == {"chat-0-0-0"}


async def test_pause_suspend_and_resume_walk_one_legal_step_at_a_time(chat: Resource, node: ScriptedNode) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await chat.patch({"lifecycle": "Suspended"})
    status = await chat.until_phase("Suspended")
    assert (condition(status, "Ready")["status"], reason(status)) == ("False", "Suspended")
    assert [condition(status, kind)["status"] for kind in ("Paused", "Suspended")] == ["True", "True"]
    await chat.patch({"lifecycle": "Running"})
    status = await chat.until_phase("Running")
    assert [condition(status, kind)["status"] for kind in ("Paused", "Suspended")] == ["False", "False"]
    assert node.launchers["chat-0-0-0"].signals == ["pause", "suspend", "resume", "unpause"]


async def test_a_change_inside_the_engine_is_in_the_status_although_no_object_changes(
    chat: Resource, node: ScriptedNode
) -> None:
    await chat.create(lifecycle="Paused")
    await chat.until_phase("Paused")
    node.launchers["chat-0-0-0"].enter("RUNNING")
    await chat.until(lambda _: "pause" in node.launchers["chat-0-0-0"].signals, "the operator to pause it again")
    status = await chat.until_phase("Paused")
    assert (status["engineState"], node.launchers["chat-0-0-0"].signals) == ("PAUSED", ["pause"])


async def test_a_settled_resource_is_not_written(chat: Resource, node: ScriptedNode) -> None:
    await chat.create()
    await chat.until_phase("Running")
    deadline = time.monotonic() + 30
    before, after = "", (await chat.get("mi", "chat"))["metadata"]["resourceVersion"]
    while before != after:
        assert time.monotonic() < deadline, "its status is written over and over"
        await asyncio.sleep(1.5)
        before, after = after, (await chat.get("mi", "chat"))["metadata"]["resourceVersion"]
    assert node.launchers["chat-0-0-0"].signals == []


async def test_a_stopped_resource_keeps_its_keys_and_starts_again(chat: Resource, node: ScriptedNode) -> None:
    await chat.create()
    await chat.until_phase("Running")
    keys = (await chat.get("secret", "chat-keys"))["data"]
    await chat.patch({"lifecycle": "Stopped"})
    status = await chat.until_phase("Stopped")
    assert (status["replicas"], await chat.pods(), node.launchers) == (0, {}, {})
    await chat.patch({"lifecycle": "Running"})
    status = await chat.until_phase("Running")
    assert (status["replicaGroups"][0]["restarts"], set(node.launchers)) == (0, {"chat-0-1-0"})
    assert (await chat.get("secret", "chat-keys"))["data"] == keys


@pytest.mark.usefixtures("node", "controllers")
async def test_deleting_the_resource_removes_everything(chat: Resource) -> None:
    await chat.create(replicas=2)
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    await chat.kubectl("delete", "mi", "chat", "--timeout=60s")
    await chat.until_gone("pods", "services", "secrets")
    assert await chat.pods() == {}


@pytest.mark.usefixtures("controllers")
async def test_a_resource_recreated_under_the_same_name_gets_children_of_its_own(
    chat: Resource, node: ScriptedNode
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await chat.kubectl("delete", "mi", "chat")
    await chat.create()
    owner = (await chat.get("mi", "chat"))["metadata"]["uid"]
    await chat.until_phase("Running")
    secret, pods = await chat.get("secret", "chat-keys"), await chat.pods()
    children = [secret, *(pods[name] for name in node.launchers)]
    assert [child["metadata"]["ownerReferences"][0]["uid"] for child in children] == [owner] * 2


@pytest.mark.usefixtures("node")
async def test_each_transition_has_one_event(chat: Resource) -> None:
    await chat.create()
    await chat.until_phase("Running")
    await chat.patch({"lifecycle": "Paused"})
    await chat.until_phase("Paused")
    events = await chat.events("Paused")
    found = [event["reason"] for event in events if event["involvedObject"]["kind"] == "MegatronInference"]
    assert sorted(found) == ["AttemptStarted", "Available", "Paused"]
    described = await chat.kubectl("describe", "mi", "chat")
    assert "chat answers at" in described


async def test_the_api_server_refuses_invalid_resources(chat: Resource, installed: Cluster) -> None:
    for wrong, field in (({"replicas": 0}, r"spec\.replicas"), ({"lifecycle": "Sleeping"}, r"spec\.lifecycle")):
        with pytest.raises(CommandFailedError, match=field):
            await chat.apply(manifest(**wrong))
    assert not installed.exists("-n", chat.namespace, "mi", "chat")
