"""The operator with an API server that fails, is busy, disconnects or stalls: no action is lost or duplicated."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster_support.cluster import Cluster, wait_until
from operator_support.faulty_server import FaultyServer, answer, cut_off, end_after, stall, watches, writes
from operator_support.fixtures import ACCOUNT, SYSTEM
from operator_support.operator_process import OperatorProcess
from operator_support.resource import Resource
from operator_support.scripted_node import ScriptedNode
from suite_support.repetition import repeated

WATCH_SILENCE = 3


@pytest.fixture
async def server(installed: Cluster) -> AsyncIterator[FaultyServer]:
    """The API server of the operator; other clients use the real one."""
    async with FaultyServer(installed.kubeconfig_for(ACCOUNT, SYSTEM)) as server:
        yield server


@pytest.fixture
def operator(shared_operator: OperatorProcess) -> None:
    """The shared operator does not run in these tests."""
    shared_operator.stop()


@pytest.fixture
async def faulty_operator(
    operator: None,  # noqa: ARG001
    server: FaultyServer,
    tmp_path: Path,
) -> AsyncIterator[OperatorProcess]:
    """An operator that uses the faulty server, instead of the shared one. Not started yet."""
    kubeconfig = server.write_kubeconfig(tmp_path / "faulty.kubeconfig")
    settings = {"MEGATRON_OPERATOR_WATCH_SILENCE": str(WATCH_SILENCE)}
    process = OperatorProcess(kubeconfig, tmp_path / "operator.log", settings=settings)
    try:
        yield process
    finally:
        await asyncio.to_thread(process.stop)


@pytest.fixture
async def running(faulty_operator: OperatorProcess) -> None:
    """It runs before the test adds rules for the server."""
    await asyncio.to_thread(faulty_operator.start)


async def run_lifecycle(chat: Resource, node: ScriptedNode) -> None:
    """Makes the resource ready, scales it up, fails a pod, scales it down and deletes it; each pod is started once."""
    await chat.create(failurePolicy={"backoff": "0.5s"})
    await chat.until_phase("Running")
    await chat.kubectl("scale", "mi", "chat", "--replicas=2")
    await chat.until(lambda status: status["ready"] == "2/2", "both groups")
    await node.fail((await chat.pods())["chat-1-0-0"], 1, "a rank died")
    await chat.until_pods("chat-0-0-0", "chat-1-1-0")
    # A status that could not be written yet still has the previous two.
    await chat.until(lambda status: (status["ready"], status["restarts"]) == ("2/2", 1), "the next attempt")
    await chat.kubectl("scale", "mi", "chat", "--replicas=1")
    await chat.until_pods("chat-0-0-0")
    await chat.kubectl("delete", "mi", "chat", "--timeout=30s")


async def restart(operator: OperatorProcess) -> None:
    """Starts it, after a stop if it runs: all its watches are new."""
    await asyncio.to_thread(operator.stop)
    await asyncio.to_thread(operator.start)


def made(server: FaultyServer, namespace: str) -> Counter[int | None]:
    """The responses of the API server to creations of pods, by status."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    return Counter(each.status for each in server.arrivals if (each.method, each.path) == ("POST", path))


@pytest.mark.usefixtures("controllers", "running")
async def test_writes_that_sometimes_fail_or_conflict_lose_and_duplicate_nothing(
    chat: Resource, node: ScriptedNode, server: FaultyServer
) -> None:
    conflict = server.when(writes("/status", "PATCH"), answer(409, "the object has been modified"), every=4)
    error = server.when(writes(), answer(500, "etcdserver: request timed out"), every=3)
    await run_lifecycle(chat, node)
    assert (conflict.done > 0, error.done > 2) == (True, True)
    assert made(server, chat.namespace)[201] == 3
    await chat.until_gone("pods", "services", "secrets", "networkpolicies")


@pytest.mark.usefixtures("controllers", "running")
async def test_writes_without_a_response_are_not_repeated(
    chat: Resource, node: ScriptedNode, server: FaultyServer
) -> None:
    pods = server.when(writes("/pods", "POST"), cut_off, times=2)
    cut = server.when(writes(), cut_off, every=3)
    await run_lifecycle(chat, node)
    assert (pods.done, cut.done > 2) == (2, True)
    # The third replaces the failed one; repeated requests found existing pods.
    assert made(server, chat.namespace)[201] + made(server, chat.namespace)[None] == 3
    await chat.until_gone("pods", "services", "secrets", "networkpolicies")


@pytest.mark.usefixtures("running", "node")
async def test_requests_to_a_busy_api_server_are_retried_after_its_delay(chat: Resource, server: FaultyServer) -> None:
    busy = server.when(writes("/pods", "POST"), answer(429, "too many requests", {"Retry-After": "2"}), times=2)
    await chat.create()
    await chat.until_phase("Running")
    path = f"/api/v1/namespaces/{chat.namespace}/pods"
    asked = [each for each in server.arrivals if (each.method, each.path) == ("POST", path)]
    assert (busy.done, [each.status for each in asked]) == (2, [429, 429, 201])
    assert all(later.at - earlier.at >= 2 for earlier, later in itertools.pairwise(asked))
    assert "TooManyRequests" not in str(await chat.status())


@pytest.mark.usefixtures("controllers")
async def test_watches_that_end_after_every_other_event_are_restarted(
    chat: Resource, node: ScriptedNode, server: FaultyServer, faulty_operator: OperatorProcess
) -> None:
    ended = server.when(watches(), end_after(2))
    await restart(faulty_operator)
    await run_lifecycle(chat, node)
    assert ended.done > 3
    await chat.until_gone("pods", "services", "secrets", "networkpolicies")


@pytest.mark.usefixtures("controllers")
async def test_watches_without_events_are_restarted(
    chat: Resource, node: ScriptedNode, server: FaultyServer, faulty_operator: OperatorProcess
) -> None:
    silent = server.when(watches(), stall)
    await restart(faulty_operator)
    await chat.create()
    await asyncio.to_thread(wait_until, lambda: silent.done >= 10, "all watches to be opened twice")
    server.rules.clear()
    await chat.until_phase("Running", within=10 * WATCH_SILENCE)
    assert set(node.launchers) == {"chat-0-0-0"}


@pytest.mark.usefixtures("node")
async def test_a_kind_that_discovery_lacks_at_the_start_is_watched_once_it_exists(
    chat: Resource, server: FaultyServer, faulty_operator: OperatorProcess
) -> None:
    """This happens for some time after the start of an API server that proxies the kind to another."""
    missing = server.when(
        lambda request: request.path.startswith("/apis/inference.megatron.dev"), answer(404, "404 page not found")
    )
    await restart(faulty_operator)
    looks = 0
    while missing.done == 0 or looks < missing.done:  # kopf repeats discovery for each CRD that it finds
        looks = missing.done
        await asyncio.sleep(2)
    server.rules.clear()
    await chat.create()
    await chat.until_phase("Running")


@pytest.mark.repetition
async def test_an_api_server_without_its_definitions_after_a_restart_ends_nothing(
    chat: Resource, server: FaultyServer, faulty_operator: OperatorProcess, node: ScriptedNode
) -> None:
    """Repeated, because it depends on the progress of the other watches. From the second time on there are pods."""
    await chat.create()
    for replicas in repeated((1, 2), (1, 2, 1, 2, 1, 2)):
        missing = server.when(
            lambda request: request.method == "GET" and request.path.endswith("/megatroninferences"),
            answer(404, "404 page not found"),
            times=2,
        )
        await restart(faulty_operator)
        await chat.patch({"replicas": replicas})
        await chat.until(lambda status, n=replicas: status.get("ready") == f"{n}/{n}", f"{replicas} groups")
        assert missing.done == 2
        server.rules.clear()
    assert len(node.launchers) == 2
