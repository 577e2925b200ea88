"""The model cache on a real API server with the Job controller, and with the real downloader and real weights."""

import asyncio
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from operator_support.api import Api
from operator_support.process_node import ProcessNode
from operator_support.questions import ask
from operator_support.resource import Json, Resource, condition, reason
from operator_support.scripted_node import ScriptedNode
from suite_support.loopback_hub import COMMIT, LoopbackHub

pytestmark = pytest.mark.usefixtures("controllers")

DOWNLOADS = "inference.megatron.dev/model-cache=chat"
FIRST, SPARE, SECOND = "chat-0-0-0", "chat-1-0-0", "chat-0-1-0"
HUB = {"repo": "owner/model"}


def model(cache: Json, **hub: Any) -> Json:
    return {"source": {"huggingFace": {**HUB, **hub}}, "cache": cache}


async def downloads(chat: Resource, count: int = 1, but: Collection[Json] = ()) -> list[Json]:
    """The pods that fill the cache besides ``but``, as soon as there are that many."""
    known = {pod["metadata"]["name"] for pod in but}
    while True:
        listed = (await chat.get("pods", selector=DOWNLOADS))["items"]
        if len(pods := [pod for pod in listed if pod["metadata"]["name"] not in known]) >= count:
            return pods
        await asyncio.sleep(0.2)


async def start(node: ScriptedNode, pod: Json) -> None:
    await node.run(pod)
    await node.make_ready(pod)


async def names_of(chat: Resource, kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in (await chat.get(kind))["items"]}


async def until_only(chat: Resource, kind: str, count: int, but: Collection[str] = ()) -> None:
    """Returns as soon as there are that many objects, and none of ``but``."""
    while True:
        found = await names_of(chat, kind)
        if len(found) == count and found.isdisjoint(but):
            return
        await asyncio.sleep(0.2)


async def test_a_claim_is_filled_once_for_all_pods_and_removed_after_a_change(
    chat: Resource, stage: ScriptedNode
) -> None:
    await chat.create(model=model({"volumeClaim": {"size": "1Gi"}}))
    (pod,) = await downloads(chat)
    status = await chat.until(lambda status: reason(status, "Cached") == "CachePending", "the download")
    assert (status["cache"]["phase"], await chat.pods()) == ("Pending", {})
    (claim,) = await names_of(chat, "persistentvolumeclaims")
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "model-cache"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    await stage.end_download(pod, 0, {"bytes": 1000, "commit": "c0ffee"})
    await start(stage, (await chat.until_pods(FIRST))[FIRST])
    status = await chat.until_phase("Running")
    assert (status["cache"]["totalBytes"], status["cache"]["commit"]) == (1000, "c0ffee")
    assert condition(status, "Cached")["status"] == "True"
    await chat.patch({"model": {"source": {"huggingFace": {"revision": "v2"}}}})
    (second,) = await downloads(chat, but=[pod])
    assert set(await chat.pods()) == {FIRST}
    assert claim in await names_of(chat, "persistentvolumeclaims")
    await stage.end_download(second, 0, {"bytes": 2000, "commit": "c0ffee"})
    await start(stage, (await chat.until_pods(FIRST, SPARE))[SPARE])
    await start(stage, (await chat.until_pods(SPARE, SECOND))[SECOND])
    await chat.until_pods(SECOND)
    await until_only(chat, "persistentvolumeclaims", 1, but={claim})
    await chat.kubectl("delete", "mi", "chat", "--timeout=60s")
    await until_only(chat, "jobs", 0)


async def test_each_node_is_filled_and_a_failed_download_is_explained(
    chat: Resource, stage: ScriptedNode, api: Api
) -> None:
    async with ScriptedNode(api, chat.namespace, by_itself=False) as other:
        nodes = sorted([stage.name, other.name])
        await chat.create(model=model({"hostPath": {"path": "/var/models", "nodes": nodes}}))
        pods = await downloads(chat, 2)
        wanted = [
            term["matchFields"][0]["values"]
            for pod in pods
            for term in pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
        ]
        assert sorted(wanted) == [[node] for node in nodes]
        assert await names_of(chat, "persistentvolumeclaims") == set()
        done, failing = pods
        await stage.end_download(done, 0, {"bytes": 1000, "commit": "c0ffee"})
        await stage.end_download(failing, 2, {"reason": "CheckpointError", "message": "m.gguf: sha256 is 1"})
        await chat.until(lambda status: "sha256 is 1" in condition(status, "Cached").get("message", ""), "the cause")
        assert await chat.pods() == {}
        (again,) = await downloads(chat, but=pods)
        await stage.end_download(again, 0, {"bytes": 1000, "commit": "c0ffee"})
        pod = (await chat.until_pods(FIRST))[FIRST]
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert [term["matchFields"][0]["values"] for term in required["nodeSelectorTerms"]] == [
            [each] for each in nodes
        ]
        status = await chat.until(lambda status: reason(status, "Cached") == "CacheFilled", "both nodes")
        assert (status["cache"]["filledNodes"], status["cache"]["nodes"]) == (2, 2)


async def test_nodes_are_selected_by_label_and_the_model_of_a_stopped_resource_is_there_before_its_start(
    chat: Resource, stage: ScriptedNode
) -> None:
    await chat.kubectl("label", "node", stage.name, f"pool={stage.name}")
    cache = {"hostPath": {"path": "/var/models", "nodeSelector": {"pool": stage.name}}}
    await chat.create(model=model(cache), lifecycle="Stopped")
    (pod,) = await downloads(chat)
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["matchFields"][0]["values"] for term in required["nodeSelectorTerms"]] == [[stage.name]]
    await stage.end_download(pod, 0, {"bytes": 1000, "commit": "c0ffee"})
    status = await chat.until(lambda status: status.get("cache", {}).get("phase") == "Ready", "the cache")
    assert (status["phase"], status["cache"]["filledNodes"]) == ("Stopped", 1)


@pytest.fixture
def hub(smollm2_path: Path) -> Iterator[LoopbackHub]:
    """A hub with the small model, which sends half of it until it may finish."""
    with LoopbackHub("owner/model", {smollm2_path.name: smollm2_path.read_bytes()}).serving() as hub:
        yield hub


@pytest.mark.model
@pytest.mark.timeout(600)
async def test_real_weights_are_downloaded_once_with_progress_and_served_by_all_groups(
    chat: Resource, machine: ProcessNode, hub: LoopbackHub, tmp_path: Path
) -> None:
    (file,) = hub.files
    size = len(hub.files[file])
    hub.may_finish.clear()
    hub.stated[file] = "0" * 64
    variables = [{"name": "HF_ENDPOINT", "value": hub.url}, {"name": "NO_PROXY", "value": "127.0.0.1"}]
    await chat.create(
        replicas=2,
        model={"servedName": "smollm2", "dtype": "float32"}
        | model({"hostPath": {"path": str(tmp_path / "models"), "nodes": [machine.name]}}, file=file),
        engine={"kvCacheMemory": "64Mi"},
        podTemplate={"spec": {"containers": [{"name": "megatron", "env": variables}]}},
    )
    status = await chat.until(lambda status: status.get("cache", {}).get("downloadedBytes", 0) > 0, "bytes", within=90)
    assert status["cache"]["totalBytes"] == size
    assert status["cache"]["downloadedBytes"] < size
    assert (status["cache"]["phase"], reason(status), await chat.pods()) == ("Downloading", "CacheDownloading", {})
    hub.may_finish.set()
    status = await chat.until(
        lambda status: "the hub states 000" in status["cache"].get("message", ""), "the mismatch", within=90
    )
    assert reason(status, "Cached").startswith("Cache")
    hub.stated.clear()
    await chat.until(lambda status: status["cache"]["phase"] == "Ready", "the cache", within=120)
    count = len(hub.downloads)
    status = await chat.until(lambda status: status.get("ready") == "2/2", "both replica groups", within=240)
    assert status["cache"] == {
        **status["cache"],
        "phase": "Ready",
        "commit": COMMIT,
        "downloadedBytes": size,
        "filledNodes": 1,
    }
    address = await machine.service_address("chat")
    async with openai.AsyncOpenAI(base_url=f"http://{address}:8000/v1", api_key="unused", timeout=120) as client:
        assert "Paris" in await ask(client)
    assert len(hub.downloads) == count
