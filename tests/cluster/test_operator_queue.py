"""Groups of pods in a queue, with a stand-in for Kueue on a real API server."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from cluster_support.cluster import Cluster
from cluster_support.control_plane import ControlPlane
from operator_support import kueue
from operator_support.api import Api
from operator_support.kueue import Kueue, QueuedNode
from operator_support.operator_process import OperatorProcess
from operator_support.resource import Resource, condition, reason

RACK = "cloud.provider.com/topology-rack"
TWO_PODS = {"parallelism": {"tensor": 2}}
FIRST_ATTEMPT = ("chat-0-0-0", "chat-0-0-1")


@pytest.fixture(scope="module")
def kueue_cluster(control_plane: Cluster) -> Iterator[None]:
    """A cluster with the kind Workload."""
    if not isinstance(control_plane, ControlPlane):
        pytest.skip(f"{control_plane.description} may have Kueue")
    kueue.install(control_plane)
    yield
    kueue.remove(control_plane)


@pytest.fixture
async def queue(kueue_cluster: None, chat: Resource, api: Api) -> AsyncIterator[Kueue]:  # noqa: ARG001
    """A queue in the namespace of ``chat``, and a node for what it admits."""
    async with Kueue(api, chat.namespace) as queue, QueuedNode(api, chat.namespace, queue.is_admitted):
        yield queue


async def queued(chat: Resource, queue: Kueue, **spec: Any) -> None:
    """Creates the resource, and returns when its first group waits."""
    await chat.create(scheduling={"queueName": queue.name}, **TWO_PODS, **spec)
    await chat.until(lambda status: reason(status) == "SchedulingGated", "the queue")


async def until_workloads(queue: Kueue, *names: str) -> None:
    while {each["metadata"]["name"] for each in await queue.workloads()} != set(names):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def test_a_group_waits_for_its_admission_in_words_and_without_a_restart(chat: Resource, queue: Kueue) -> None:
    topology = {"groupTopology": {"key": RACK}, "queueName": queue.name}
    limits = {"startupTimeout": "1s", "gangTimeout": "1s"}
    await chat.create(scheduling=topology, failurePolicy=limits, **TWO_PODS)
    status = await chat.until(lambda status: reason(status) == "SchedulingGated", "the queue")
    words = f"Kueue has not admitted Workload chat-0-0 of LocalQueue {queue.name} yet"
    assert words in condition(status, "Ready")["message"]
    before = await chat.until_pods(*FIRST_ATTEMPT)
    await asyncio.wait_for(until_workloads(queue, "chat-0-0"), 30)
    (workload,) = await queue.workloads()
    assert [each["count"] for each in workload["spec"]["podSets"]] == [1, 1]
    for pods in workload["spec"]["podSets"]:
        assert pods["topologyRequest"] == {"required": RACK, "podSetGroupName": "chat"}
    await asyncio.sleep(3)
    after = await chat.until_pods(*FIRST_ATTEMPT)
    assert {name: pod["metadata"]["uid"] for name, pod in after.items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    await chat.patch({"failurePolicy": None})
    queue.quota = 1
    status = await chat.until_phase("Running")
    assert [(each["attempt"], each["restarts"]) for each in status["replicaGroups"]] == [(0, 0)]


async def test_another_replica_group_is_another_workload(chat: Resource, queue: Kueue) -> None:
    queue.quota = 1
    await chat.create(scheduling={"queueName": queue.name}, **TWO_PODS)
    await chat.until_phase("Running")
    await chat.kubectl("scale", "mi", "chat", "--replicas=2")
    await chat.until_pods(*FIRST_ATTEMPT, "chat-1-0-0", "chat-1-0-1")
    await asyncio.wait_for(until_workloads(queue, "chat-0-0", "chat-1-0"), 30)
    status = await chat.until(
        lambda status: "chat-1-0 of" in str(status["conditions"]), "the second group in the queue"
    )
    assert condition(status, "Ready")["status"] == "True"
    queue.quota = 2
    await chat.until(lambda status: status.get("readyReplicas") == 2, "two groups")


async def test_an_evicted_group_is_queued_again_and_no_restart_is_counted(chat: Resource, queue: Kueue) -> None:
    queue.quota = 1
    await chat.create(scheduling={"queueName": queue.name}, **TWO_PODS)
    await chat.until_phase("Running")
    queue.quota = 0
    await queue.evict("chat-0-0", "Preempted to accommodate a workload")
    await chat.until_pods("chat-0-1-0", "chat-0-1-1")
    await asyncio.wait_for(until_workloads(queue, "chat-0-1"), 30)
    words = f"Kueue has not admitted Workload chat-0-1 of LocalQueue {queue.name} yet"
    await chat.until(lambda status: words in condition(status, "Ready").get("message", ""), "the queue")
    queue.quota = 1
    status = await chat.until_phase("Running")
    assert [(each["attempt"], each["restarts"]) for each in status["replicaGroups"]] == [(1, 0)]


async def test_a_stopped_or_deleted_resource_leaves_the_queue(chat: Resource, queue: Kueue) -> None:
    await queued(chat, queue)
    await asyncio.wait_for(until_workloads(queue, "chat-0-0"), 30)
    await chat.patch({"lifecycle": "Stopped"})
    await chat.until_pods(within=20)
    await asyncio.wait_for(until_workloads(queue), 30)
    await chat.until_phase("Stopped")
    await chat.patch({"lifecycle": "Running"})
    await asyncio.wait_for(until_workloads(queue, "chat-0-1"), 30)
    await chat.kubectl("delete", "mi", "chat", "--wait=false")
    await chat.until_pods(within=20)
    await asyncio.wait_for(until_workloads(queue), 30)


async def test_a_resource_that_is_deleted_while_no_operator_runs_leaves_the_queue(
    chat: Resource, queue: Kueue, operator: OperatorProcess
) -> None:
    await queued(chat, queue)
    await asyncio.wait_for(until_workloads(queue, "chat-0-0"), 30)
    operator.stop()
    await chat.kubectl("delete", "mi", "chat")
    operator.ensure_started()
    await chat.until_pods(within=20)
    await asyncio.wait_for(until_workloads(queue), 30)


async def test_queued_pods_that_stay_without_their_resource_stay_queued(chat: Resource, queue: Kueue) -> None:
    await queued(chat, queue)
    await asyncio.wait_for(until_workloads(queue, "chat-0-0"), 30)
    await chat.kubectl("delete", "mi", "chat", "--cascade=orphan")
    await asyncio.sleep(2)
    pods = await chat.until_pods(*FIRST_ATTEMPT)
    for each in (*pods.values(), *await queue.workloads()):
        assert "deletionTimestamp" not in each["metadata"]


async def test_a_queued_group_that_loses_a_pod_is_replaced_as_a_whole(chat: Resource, queue: Kueue) -> None:
    await queued(chat, queue)
    await asyncio.wait_for(until_workloads(queue, "chat-0-0"), 30)
    await chat.kubectl("delete", "pod", "chat-0-0-1", "--wait=false")
    await chat.until_pods("chat-0-1-0", "chat-0-1-1", within=20)
    await asyncio.wait_for(until_workloads(queue, "chat-0-1"), 30)
    queue.quota = 1
    await chat.until_phase("Running")
