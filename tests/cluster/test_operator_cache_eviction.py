"""Eviction from shared model caches on a real API server with the Job controller."""

import asyncio
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from cluster_support.cluster import Cluster
from operator_support.operator_process import OperatorProcess, in_the_place_of
from operator_support.process_node import ProcessNode
from operator_support.resource import Json, Resource
from operator_support.scripted_node import ScriptedNode
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell, assert_table
from suite_support.loopback_hub import LoopbackHub

from megatron_operator.settings import CACHE_RETENTION_VARIABLE

pytestmark = [pytest.mark.usefixtures("controllers"), pytest.mark.timeout(300)]

UNUSED = "inference.megatron.dev/unused-model"
HUB = {"huggingFace": {"repo": "owner/model"}}
FILES = {"config.json": b"{}", "model.safetensors": bytes(1000)}
RECORDED, EVICTED = "recorded", "evicted"


@pytest.fixture
def operator(shared_operator: OperatorProcess) -> OperatorProcess:
    """The shared operator does not run in these tests."""
    shared_operator.stop()
    return shared_operator


@pytest.fixture
def forgetful(
    chat: Resource, operator: OperatorProcess, installed: Cluster, tmp_path: Path
) -> Iterator[OperatorProcess]:
    """The operator with the permissions of its ServiceAccount, which evicts a model at once after its last use."""
    kubeconfig = installed.kubeconfig_for("megatron-operator", "megatron-system")
    settings = {CACHE_RETENTION_VARIABLE: "0"}
    other = OperatorProcess(kubeconfig, tmp_path / "operator.log", namespaces=[chat.namespace], settings=settings)
    with in_the_place_of(operator, other):
        yield other


async def jobs(chat: Resource) -> list[str]:
    """What the Jobs are for, sorted."""
    listed = (await chat.get("jobs"))["items"]
    return sorted(job["metadata"]["labels"].get(UNUSED, "download") for job in listed)


async def until_jobs(chat: Resource, *wanted: str) -> None:
    """Returns as soon as there are these Jobs and no others."""
    while True:
        if await jobs(chat) == list(wanted):
            return
        await asyncio.sleep(0.2)


async def pods_of(chat: Resource, word: str, but: Collection[str] = ()) -> list[Json]:
    """The pods that run ``model <word>``, as soon as there is one besides ``but``."""
    while True:
        listed = (await chat.get("pods"))["items"]
        args = {pod["metadata"]["name"]: pod["spec"]["containers"][0].get("args", []) for pod in listed}
        found = [pod for pod in listed if args[pod["metadata"]["name"]][:2] == ["model", word]]
        if found := [pod for pod in found if pod["metadata"]["name"] not in but]:
            return found
        await asyncio.sleep(0.2)


async def until_running(chat: Resource, stage: ScriptedNode, but: Collection[str] = ()) -> str:
    """Fills the cache and starts the pods. Returns the name of the download's pod."""
    (download,) = await pods_of(chat, "fetch", but)
    await stage.end_download(download, 0, {"bytes": 1000, "commit": "c0ffee"})
    (pod,) = (await chat.until_pods(f"{chat.name}-0-0-0")).values()
    await stage.run(pod)
    await stage.make_ready(pod)
    await chat.until_phase("Running")
    return str(download["metadata"]["name"])


async def test_the_model_of_a_deleted_resource_is_evicted_also_if_no_operator_ran_meanwhile(
    chat: Resource, stage: ScriptedNode, forgetful: OperatorProcess, reader: DocShell
) -> None:
    await chat.create(model={"source": HUB, "cache": {"claimName": "models"}})
    await until_running(chat, stage)
    forgetful.stop()
    await chat.kubectl("delete", "mi", "chat", "--timeout=60s")
    await chat.until_gone("pods", "services")
    assert await jobs(chat) == ["download"]
    forgetful.start()
    (eviction,) = await pods_of(chat, "evict")
    assert await jobs(chat) == [EVICTED, RECORDED]
    (get,) = documented("docs/operations.md", "kubectl get jobs")
    assert_table(get.output, await asyncio.to_thread(reader.run, get.command))
    (volume,) = [each for each in eviction["spec"]["volumes"] if each["name"] == "model-cache"]
    assert volume["persistentVolumeClaim"]["claimName"] == "models"
    await stage.end_download(eviction, 0, {})
    await until_jobs(chat)


async def test_a_model_that_another_resource_or_a_pod_uses_is_not_evicted(
    chat: Resource, stage: ScriptedNode, forgetful: OperatorProcess
) -> None:
    cache = {"claimName": "models"}
    await chat.create(model={"source": HUB, "cache": cache})
    first = await until_running(chat, stage)
    other = Resource(chat.cluster, chat.namespace, "other")
    await other.create(model={"source": HUB, "cache": cache}, lifecycle="Stopped")
    (second,) = await pods_of(chat, "fetch", but=[first])
    await stage.end_download(second, 0, {"bytes": 1000, "commit": "c0ffee"})
    await other.kubectl("delete", "mi", "other", "--timeout=60s")
    await chat.patch({"model": {"source": {"huggingFace": {"revision": "v2"}}}})
    done = [first, second["metadata"]["name"]]
    (changed,) = await pods_of(chat, "fetch", but=done)
    # The pod still has the former revision.
    for _ in range(3):
        await asyncio.sleep(1)
        assert await jobs(chat) == ["download"] * 3
    assert forgetful.is_healthy()
    await stage.end_download(changed, 0, {"bytes": 1000, "commit": "c0ffee"})
    spare = (await chat.until_pods("chat-0-0-0", "chat-1-0-0"))["chat-1-0-0"]
    await stage.run(spare)
    await stage.make_ready(spare)
    successor = (await chat.until_pods("chat-1-0-0", "chat-0-1-0"))["chat-0-1-0"]
    await stage.run(successor)
    await stage.make_ready(successor)
    (eviction,) = await pods_of(chat, "evict")
    await stage.end_download(eviction, 0, {})
    await until_jobs(chat, "download")


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    """A hub with the files of a checkpoint."""
    with LoopbackHub("owner/model", FILES).serving() as hub:
        yield hub


async def test_the_folder_of_a_node_is_removed(
    chat: Resource, machine: ProcessNode, forgetful: OperatorProcess, hub: LoopbackHub, tmp_path: Path
) -> None:
    variables = [{"name": "HF_ENDPOINT", "value": hub.url}, {"name": "NO_PROXY", "value": "127.0.0.1"}]
    root = tmp_path / "models"
    await chat.create(
        lifecycle="Stopped",
        model={"source": HUB, "cache": {"hostPath": {"path": str(root), "nodes": [machine.name]}}},
        podTemplate={"spec": {"containers": [{"name": "megatron", "env": variables}]}},
    )
    status = await chat.until(lambda status: status.get("cache", {}).get("phase") == "Ready", "the cache", within=90)
    folder = root / chat.namespace / status["cache"]["source"]
    assert (folder / "model.safetensors").exists()
    await chat.kubectl("delete", "mi", "chat", "--timeout=60s")
    await until_jobs(chat)
    assert not folder.exists()
    assert forgetful.is_healthy()
