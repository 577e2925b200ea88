"""The whole thing: a real API server, the operator, and the real runtime with real weights in the pods."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import yaml
from cluster_support.control_plane import ControlPlane
from operator_support.api import Api
from operator_support.fixtures import MANIFESTS
from operator_support.process_node import ProcessNode
from operator_support.resource import Resource, condition

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SAMPLE = MANIFESTS / "samples" / "smollm2.yaml"
OVER_PODS = MANIFESTS / "samples" / "smollm2-over-pods.yaml"
QUESTION = "What is the capital of France?"


@pytest.fixture
async def machine(
    own_control_plane: ControlPlane,  # noqa: ARG001  # a cluster that was given has nodes of its own
    api: Api,
    namespace: str,
    tmp_path: Path,
    smollm2_path: Path,
) -> AsyncIterator[ProcessNode]:
    """A node on which pods are processes."""
    async with ProcessNode(api, namespace, tmp_path / "pods", smollm2_path.parent) as node:
        yield node


@pytest.fixture
def smollm2(chat: Resource) -> Resource:
    """The sample, not applied yet."""
    return Resource(chat.cluster, chat.namespace, "smollm2")


def client_of(machine: ProcessNode, name: str = "smollm2") -> openai.AsyncOpenAI:
    """The official client at the address behind the HTTP Service."""
    address = machine.service_address(name)
    return openai.AsyncOpenAI(base_url=f"http://{address}:8000/v1", api_key="unused", max_retries=0, timeout=120)


def is_running(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


async def ask(client: openai.AsyncOpenAI) -> str:
    answer = await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24
    )
    return answer.choices[0].message.content or ""


async def test_the_sample_answers_waits_while_paused_and_leaves_nothing_behind(
    smollm2: Resource, machine: ProcessNode
) -> None:
    await smollm2.apply(yaml.safe_load(SAMPLE.read_text()))
    await smollm2.until(lambda status: status.get("ready") == "2/2", "both replica groups", within=120)
    status = await smollm2.until_phase("Running")
    assert status["modelName"] == "smollm2"
    async with client_of(machine) as client:
        assert "Paris" in await ask(client)

        await smollm2.patch({"lifecycle": "Paused"})
        await smollm2.kubectl("wait", "--for=condition=Paused", "mi/smollm2", "--timeout=60s")
        waiting = asyncio.create_task(ask(client))
        await smollm2.patch({"lifecycle": "Suspended"})
        status = await smollm2.until_phase("Suspended")
        assert condition(status, "Ready")["reason"] == "Suspended"
        assert not waiting.done()

        await smollm2.patch({"lifecycle": "Running"})
        await smollm2.until_phase("Running")
        assert "Paris" in await waiting
        assert "Paris" in await ask(client)
    processes = [status.pid for status in machine.processes.statuses()]
    await smollm2.kubectl("delete", "mi", "smollm2", "--timeout=60s")
    await smollm2.until_gone("pods", "services", "secrets", within=90)
    assert [pid for pid in processes if is_running(pid)] == []


async def test_the_pods_of_one_copy_find_each_other_and_answer_together(chat: Resource, machine: ProcessNode) -> None:
    spread = Resource(chat.cluster, chat.namespace, "smollm2-over-pods")
    await spread.apply(yaml.safe_load(OVER_PODS.read_text()))
    status = await spread.until(lambda status: status.get("ready") == "1/1", "both pods of the group", within=120)
    assert (status["groups"][0]["readyPods"], status["groups"][0]["totalPods"]) == (2, 2)
    async with client_of(machine, spread.name) as client:
        assert await ask(client) == "The capital of France is Paris."
    await spread.kubectl("delete", "mi", spread.name, "--timeout=60s")
    await spread.until_gone("pods", "services", "secrets", within=90)


@pytest.mark.usefixtures("machine")
async def test_a_model_that_is_not_there_is_explained_in_the_launchers_words(smollm2: Resource) -> None:
    resource = yaml.safe_load(SAMPLE.read_text())
    resource["spec"]["replicas"] = 1
    resource["spec"]["model"]["source"]["path"] = "/models/missing.gguf"
    await smollm2.apply(resource)
    status = await smollm2.until_phase("Failed", within=120)
    assert "missing.gguf" in condition(status, "Failed")["message"]
    assert set(await smollm2.pods()) == {"smollm2-0-0-0"}
