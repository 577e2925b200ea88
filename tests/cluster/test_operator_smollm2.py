"""A real API server, the operator, and the real runtime with real weights in the pods."""

import asyncio
import contextlib
import math
import os
import signal
import time
from pathlib import Path

import openai
import pytest
import yaml
from operator_support.fixtures import MANIFESTS
from operator_support.process_node import ProcessNode
from operator_support.questions import ask, check_requests_wait
from operator_support.resource import Resource, condition

from megatron_operator.local.processes import descendants

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SAMPLE = MANIFESTS / "samples" / "smollm2.yaml"
OVER_PODS = MANIFESTS / "samples" / "smollm2-over-pods.yaml"
CLIENTS = 4


@pytest.fixture
def smollm2(chat: Resource) -> Resource:
    """The sample, not applied yet."""
    return Resource(chat.cluster, chat.namespace, "smollm2")


async def serve(smollm2: Resource) -> None:
    """Applies the sample; returns when both replica groups are ready."""
    await smollm2.apply(yaml.safe_load(SAMPLE.read_text()))
    await smollm2.until(lambda status: status.get("ready") == "2/2", "both replica groups", within=120)


def launcher_of(machine: ProcessNode, pod: str) -> int:
    """The launcher's process id, which is also the process group of the pod."""
    status = machine.processes.status(pod, machine.namespace)
    assert status is not None
    assert status.pid is not None
    return status.pid


async def client_of(machine: ProcessNode, name: str = "smollm2") -> openai.AsyncOpenAI:
    """The official client with the address of the HTTP Service."""
    address = await machine.service_address(name)
    return openai.AsyncOpenAI(base_url=f"http://{address}:8000/v1", api_key="unused", max_retries=0, timeout=120)


async def patient_client_of(machine: ProcessNode) -> openai.AsyncOpenAI:
    """The same client with its default retries, and a new connection per request."""
    headers = {"Connection": "close"}
    address = await machine.service_address("smollm2")
    return openai.AsyncOpenAI(base_url=f"http://{address}:8000/v1", api_key="unused", default_headers=headers)


def is_running(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def command_line(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


async def test_the_sample_answers_through_pauses_and_losses_of_its_leader_and_leaves_nothing_behind(
    smollm2: Resource, machine: ProcessNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """One start of the sample for all of it: a start of two pods takes as much CPU time as everything else here."""
    await serve(smollm2)
    status = await smollm2.until_phase("Running")
    assert status["modelName"] == "smollm2"
    async with await client_of(machine) as client:
        assert "Paris" in await ask(client)
        await check_requests_wait(smollm2, client)
        assert "Paris" in await ask(client)
    await check_the_client_sees_only_a_delay_when_the_leader_fails(smollm2, machine, capsys)
    for stopped in ("the launcher", "everything"):
        await check_another_pod_leads_while_the_leader_hangs(smollm2, machine, stopped, capsys)
    processes = [status.pid for status in machine.processes.statuses()]
    await smollm2.kubectl("delete", "mi", "smollm2", "--timeout=60s")
    await smollm2.until_gone("pods", "services", "secrets", within=90)
    assert [pid for pid in processes if is_running(pid)] == []


async def check_the_client_sees_only_a_delay_when_the_leader_fails(
    smollm2: Resource, machine: ProcessNode, capsys: pytest.CaptureFixture[str]
) -> None:
    """The official client asks while the first leader is killed. Returns when the lost group is ready again."""
    leader = launcher_of(machine, "smollm2-0-0-0")
    answered: list[tuple[float, str]] = []
    killed = math.inf

    async def ask_on() -> None:
        async with await patient_client_of(machine) as client:
            while len([None for begun, _ in answered if begun > killed]) < 8:
                begun = time.monotonic()
                answered.append((begun, await ask(client)))

    asking = [asyncio.create_task(ask_on()) for _ in range(CLIENTS)]
    while len(answered) < CLIENTS and not any(task.done() for task in asking):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    killed = time.monotonic()
    os.killpg(leader, signal.SIGKILL)
    await smollm2.until(lambda status: status["leader"]["pod"] == "smollm2-1-0-0", "the next leader")
    moved = time.monotonic() - killed
    await asyncio.gather(*asking)
    with capsys.disabled():
        print(f"\nleader killed: moved after {moved:.1f} s, eight more answers after {time.monotonic() - killed:.1f} s")
    assert {text for _, text in answered} == {"The capital of France is Paris."}
    selected = await smollm2.get("pods", selector="inference.megatron.dev/role=leader")
    assert [pod["metadata"]["name"] for pod in selected["items"]] == ["smollm2-1-0-0"]
    events = [event for event in await smollm2.events("LeaderMoved") if event["reason"] == "LeaderMoved"]
    assert len(events) == 1
    await smollm2.until(lambda status: status.get("ready") == "2/2", "the group that was lost", within=120)


async def check_another_pod_leads_while_the_leader_hangs(
    smollm2: Resource, machine: ProcessNode, stopped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The former leader gives up the role when it continues, and both pods answer."""
    former = (await smollm2.status())["leader"]["pod"]
    leader = launcher_of(machine, former)
    processes = [leader]
    if stopped == "everything":
        processes += [each.pid for each in descendants(leader)]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    began = time.monotonic()
    await smollm2.until(lambda status: status["leader"].get("pod") not in (None, "", former), "the next leader")
    moved = time.monotonic() - began
    async with await patient_client_of(machine) as client:
        assert "Paris" in await ask(client)
    answered = time.monotonic() - began
    with capsys.disabled():
        print(f"\n{stopped} stopped: moved after {moved:.1f} s, answered after {answered:.1f} s")
    for process in processes:
        os.kill(process, signal.SIGCONT)
    await smollm2.until(lambda status: status.get("ready") == "2/2", "the former leader as a follower", within=60)
    assert [each for each in descendants(leader) if b"coordinator_process" in command_line(each.pid)] == []
    async with await client_of(machine) as client:
        assert {await ask(client) for _ in range(4)} == {"The capital of France is Paris."}


async def test_the_pods_of_one_replica_group_connect_and_answer(chat: Resource, machine: ProcessNode) -> None:
    spread = Resource(chat.cluster, chat.namespace, "smollm2-over-pods")
    await spread.apply(yaml.safe_load(OVER_PODS.read_text()))
    status = await spread.until(lambda status: status.get("ready") == "1/1", "both pods of the group", within=120)
    assert (status["replicaGroups"][0]["readyPods"], status["replicaGroups"][0]["totalPods"]) == (2, 2)
    async with await client_of(machine, spread.name) as client:
        assert await ask(client) == "The capital of France is Paris."
    await spread.kubectl("delete", "mi", spread.name, "--timeout=60s")
    await spread.until_gone("pods", "services", "secrets", within=90)


@pytest.mark.usefixtures("machine")
async def test_a_missing_model_is_reported_with_the_message_of_the_launcher(smollm2: Resource) -> None:
    resource = yaml.safe_load(SAMPLE.read_text())
    resource["spec"]["replicas"] = 1
    resource["spec"]["model"]["source"]["path"] = "/models/missing.gguf"
    await smollm2.apply(resource)
    status = await smollm2.until_phase("Failed", within=120)
    assert "missing.gguf" in condition(status, "Failed")["message"]
    assert set(await smollm2.pods()) == {"smollm2-0-0-0"}
