"""The whole product: built images, Helm, kubectl, pods on a real node, and clients inside and outside of the cluster.

The tests share one release and one resource, and run in order.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from chart_support.helm import NAMESPACE
from chart_support.release import NAME
from cluster_support.cluster import wait_until
from node_support.model_hub import MODEL, ModelHub
from node_support.node import SECONDS_TO_REMOVE_A_POD, Node
from node_support.port_forward import PortForward
from node_support.quickstart import Quickstart
from node_support.stage import Stage
from operator_support.questions import QUESTION, ask, check_requests_wait
from operator_support.resource import Resource, condition, manifest, reason

from megatron_operator.render.command import CACHED_MODEL_MOUNT
from megatron_operator.render.placement import HOSTNAME

pytestmark = [pytest.mark.model, pytest.mark.timeout(480)]

SAMPLES = Path(__file__).parents[2] / "manifests/samples"
GPU = "nvidia.com/gpu"
ACTIVATOR = "service/megatron-megatron-inference-activator"
WEIGHTS = 134_515_008 * 4
"""Bytes of SmolLM2's parameters in float32."""
PAUSE_SECONDS = 1.0
"""Between two requests of a client under load: without it, the clients take the processor from the pods that start."""
ASK_AND_STREAM = """
import json, sys, urllib.request
question = {"messages": [{"role": "user", "content": sys.argv[2]}], "temperature": 0, "max_tokens": 16}
def post(**more):
    body = json.dumps({"model": "smollm2", **question, **more}).encode()
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers), timeout=90)
whole = json.load(post())["choices"][0]["message"]["content"]
events = [line[6:] for line in post(stream=True).read().decode().splitlines() if line.startswith("data: {")]
deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
print(json.dumps({"whole": whole, "streamed": "".join(deltas), "parts": sum(map(bool, deltas))}))
"""

IMPORT_AND_LIST = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
files = {name: getattr(module, "__cached__", None) for name, module in sys.modules.items()}
print(*(name for name, file in files.items() if file and not os.path.exists(file)))
"""


def memory_of(resource: Resource) -> int:
    """The working set of its first pod in bytes, in the kubelet's next measurement."""
    begun, pod = datetime.now(UTC).isoformat(), f"{resource.name}-0-0-0"
    node = resource.cluster.get("pod", pod, "-n", resource.namespace)["spec"]["nodeName"]
    found: list[dict[str, Any]] = []

    def is_measured() -> bool:
        summary = resource.cluster.request("GET", f"/api/v1/nodes/{node}/proxy/stats/summary")
        pods = [each for each in summary["pods"] if each["podRef"]["name"] == pod]
        ours = [each for each in pods if each["podRef"]["namespace"] == resource.namespace]
        found[:] = [container["memory"] for each in ours for container in each.get("containers", [])]
        return bool(found) and all(each["time"] > begun for each in found)

    wait_until(is_measured, f"the kubelet to measure {pod}", 60, 1.0)
    return sum(each["workingSetBytes"] for each in found)


@asynccontextmanager
async def client_of(target: str, sample: Resource, folder: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client outside of the cluster."""
    with PortForward(sample.cluster, sample.namespace, target, 8000, folder) as forwarded:
        url = f"{forwarded.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=150) as client:
            yield client


@pytest.fixture
async def client(sample: Resource, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the Service; kubectl's port-forward selects one of its pods."""
    async with client_of(f"service/{sample.name}", sample, tmp_path) as client:
        yield client


@pytest.fixture
async def client_of_first_pod(sample: Resource, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a pod that stays when replica groups are removed: a port-forward ends with its pod."""
    async with client_of(f"pod/{sample.name}-0-0-0", sample, tmp_path) as client:
        yield client


async def first_token_and_text(client: openai.AsyncOpenAI, model: str) -> tuple[float, str]:
    """Seconds until the first text of a streamed answer, and the answer."""
    began, first, text = time.monotonic(), 0.0, ""
    messages: Any = [{"role": "user", "content": QUESTION}]
    stream = await client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=16, stream=True
    )
    async for part in stream:
        delta = part.choices[0].delta.content if part.choices else None
        first = first or (time.monotonic() - began if delta else 0.0)
        text += delta or ""
    return first, text


@pytest.mark.usefixtures("sample")
def test_the_quickstart_for_kind_answers(quickstart: Quickstart) -> None:
    """Its other commands have run: they made the release and the resource of these tests."""
    assert quickstart.run_until("the end") == "The capital of France is Paris.\n"
    assert quickstart.is_complete


def test_helm_test_passes_with_the_image_of_the_operator(real_stage: Stage) -> None:
    assert "Phase:          Succeeded" in real_stage.test()


def test_a_pod_uses_the_sample_by_its_service_name_and_streams(real_stage: Stage, sample: Resource) -> None:
    status = sample.cluster.get("mi", sample.name, "-n", sample.namespace)["status"]
    said = json.loads(real_stage.run_in_pod(sample.namespace, ASK_AND_STREAM, status["url"], QUESTION))
    assert said["whole"] == said["streamed"] == "The capital of France is Paris."
    assert said["parts"] > 3


def test_pods_compile_none_of_the_modules_that_they_import(sample: Resource) -> None:
    imports = {
        (sample.namespace, f"pod/{sample.name}-0-0-0"): ("megatron_runtime.cli", "megatron_runtime.rank"),
        (NAMESPACE, f"deployment/{NAME}"): ("megatron_operator.cli", "megatron_operator.handlers"),
    }
    for (namespace, target), modules in imports.items():
        words = ("-n", namespace, "exec", target, "--", "python3", "-c", IMPORT_AND_LIST, *modules)
        assert sample.cluster.kubectl(*words).split() == []


async def test_clients_outside_the_cluster_use_a_port_forward(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["smollm2"]
    assert "Paris" in await ask(client)
    stream = await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=16, stream=True
    )
    assert "Paris" in "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])


def test_the_private_ports_of_a_pod_are_not_open_to_a_port_forward(sample: Resource) -> None:
    """They listen only on the pod's address, where NetworkPolicies apply."""
    pod = f"{sample.name}-0-0-0"
    script = "import socket\nfor port in (9000, 5557):\n print(socket.socket().connect_ex(('127.0.0.1', port)))"
    said = sample.cluster.kubectl("-n", sample.namespace, "exec", pod, "--", "python3", "-c", script)
    assert "0" not in said.split()


async def test_requests_wait_while_paused_and_suspended_and_are_answered_after_kubectl_patch(
    sample: Resource, client: openai.AsyncOpenAI
) -> None:
    await check_requests_wait(sample, client)


async def test_scaling_under_load_answers_every_request(
    sample: Resource, client_of_first_pod: openai.AsyncOpenAI
) -> None:
    done = asyncio.Event()

    async def keep_asking() -> list[str]:
        answers = []
        while not done.is_set():
            answers.append(await ask(client_of_first_pod, 16, extra_body={"ignore_eos": True}))
            await asyncio.sleep(PAUSE_SECONDS)
        return answers

    async def scale(replicas: int) -> None:
        await sample.kubectl("scale", f"mi/{sample.name}", f"--replicas={replicas}")
        wanted = f"{replicas}/{replicas}"
        await sample.until(lambda status: status.get("ready") == wanted, f"{wanted} ready", within=150)

    async with asyncio.TaskGroup() as tasks:
        loads = [tasks.create_task(keep_asking()) for _ in range(4)]
        for replicas in (1, 3, 1):
            await scale(replicas)
        done.set()
    answers = [answer for load in loads for answer in load.result()]
    assert len(answers) > 8
    assert len(set(answers)) == 1


async def test_an_upgrade_replaces_the_operator_and_leaves_the_models_alone(
    real_stage: Stage, sample: Resource, client: openai.AsyncOpenAI
) -> None:
    leader, operator = f"{sample.name}-0-0-0", set(real_stage.operator_pods())
    uid = (await sample.get("pod", leader))["metadata"]["uid"]
    await asyncio.to_thread(real_stage.upgrade, "--set", "logging.verbose=true")
    is_gone = operator.isdisjoint
    wait_until(lambda: is_gone(real_stage.operator_pods()), "the older operator to go", SECONDS_TO_REMOVE_A_POD)
    await sample.patch({"lifecycle": "Paused"})
    await sample.until_phase("Paused")
    await sample.patch({"lifecycle": "Running"})
    await sample.until_phase("Running")
    assert (await sample.get("pod", leader))["metadata"]["uid"] == uid
    assert "Paris" in await ask(client)


async def test_a_stopped_resource_has_no_pods(sample: Resource) -> None:
    await sample.patch({"lifecycle": "Stopped"})
    await sample.until_phase("Stopped", within=SECONDS_TO_REMOVE_A_POD)
    await sample.until_pods(within=SECONDS_TO_REMOVE_A_POD)


async def test_a_suspended_pod_releases_the_memory_of_its_weights_and_loads_them_again(
    real_stage: Stage, stage_namespace: str
) -> None:
    thrifty = Resource(real_stage.cluster, stage_namespace, "thrifty")
    resource = yaml.safe_load((SAMPLES / "smollm2.yaml").read_text())
    resource["metadata"]["name"] = thrifty.name
    resource["spec"] |= {"replicas": 1, "engine": {**resource["spec"]["engine"], "offloadWeights": True}}
    await thrifty.kubectl("apply", "--validate=false", "-f", "-", input=json.dumps(resource))
    await thrifty.until_phase("Running", within=300)
    serving = await asyncio.to_thread(memory_of, thrifty)
    await thrifty.patch({"lifecycle": "Suspended"})
    await thrifty.until_phase("Suspended")
    suspended = await asyncio.to_thread(memory_of, thrifty)
    assert suspended < serving - WEIGHTS // 2
    await thrifty.patch({"lifecycle": "Running"})
    await thrifty.until_phase("Running")
    assert await asyncio.to_thread(memory_of, thrifty) > suspended + WEIGHTS // 2
    await thrifty.kubectl("delete", "mi", thrifty.name, "--timeout=50s")


async def test_a_replica_group_of_two_pods_answers(real_stage: Stage, stage_namespace: str) -> None:
    spread = Resource(real_stage.cluster, stage_namespace, "smollm2-over-pods")
    await spread.kubectl("apply", "--validate=false", "-f", str(SAMPLES / "smollm2-over-pods.yaml"))
    status = await spread.until(lambda status: status.get("ready") == "1/1", "both pods of the group", within=300)
    assert (status["replicaGroups"][0]["readyPods"], status["replicaGroups"][0]["totalPods"]) == (2, 2)
    said = await asyncio.to_thread(real_stage.run_in_pod, stage_namespace, ASK_AND_STREAM, status["url"], QUESTION)
    assert json.loads(said)["whole"] == "The capital of France is Paris."
    await spread.kubectl("delete", "mi", spread.name, "--timeout=50s")
    await spread.until_gone("pods", "services", "secrets", within=SECONDS_TO_REMOVE_A_POD)


def has_started(pod: dict[str, Any]) -> bool:
    return any(each["state"].get("running") for each in pod["status"].get("containerStatuses", []))


@pytest.fixture(scope="module")
def hub(own_node: Node, real_stage: Stage, stage_namespace: str) -> ModelHub:
    return ModelHub(own_node, real_stage, stage_namespace)


async def test_a_job_fills_a_folder_of_the_node_and_a_pod_reads_it(
    own_node: Node, stage_namespace: str, hub: ModelHub
) -> None:
    """Both with the users and rights that real containers have, and the kubelet's check of the folder."""
    root = own_node.folder / "scratch" / "model-cache"
    async with hub.cached("cached", {"hostPath": {"path": str(root), "nodes": [own_node.name]}}) as cached:
        found = (await cached.until_phase("Running", within=240))["cache"]
        assert (found["phase"], found["filledNodes"]) == ("Ready", 1)
        folder = root / stage_namespace / found["source"]
        assert (folder.stat().st_uid, (folder / Path(MODEL).name).stat().st_size) == (0, found["totalBytes"])
        pod = await cached.get("pod", "cached-0-0-0")
        assert pod["spec"]["securityContext"]["runAsUser"] != 0
        ask = ("python3", "-c", ASK_AND_STREAM, "http://127.0.0.1:8000/v1", QUESTION)
        said = await cached.kubectl("exec", "cached-0-0-0", "--", *ask)
        assert json.loads(said)["whole"] == "The capital of France is Paris."


async def test_a_job_fills_a_claim_and_a_pod_reads_a_folder_of_it(own_node: Node, hub: ModelHub) -> None:
    """The volume is a folder of the node. The kubelet gives it to the pods' group, and mounts a part read-only."""
    root = own_node.folder / "scratch" / "volume"
    root.mkdir(mode=0o700)
    selector = [{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": [own_node.name]}]}]
    modes = {"accessModes": ["ReadWriteMany"], "storageClassName": "by-hand", "capacity": {"storage": "1Gi"}}
    affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": selector}}}
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "models"}}
    own_node.apply("default", volume | {"spec": {**modes, **affinity, "local": {"path": str(root)}}})
    async with hub.cached("claimed", {"volumeClaim": {"size": "1Gi", "storageClassName": "by-hand"}}) as claimed:
        pod = await claimed.until_found("pod", "claimed-0-0-0", has_started, within=240)
        found = (await claimed.status())["cache"]
        assert found["phase"] == "Ready"
        (file,) = root.glob(f"**/{Path(MODEL).name}")
        user = pod["spec"]["securityContext"]["runAsUser"]
        assert (file.stat().st_uid, root.stat().st_gid, file.stat().st_size) == (user, user, found["totalBytes"])
        inside = f"head -c 4 {CACHED_MODEL_MOUNT}/{file.name} && grep ' {CACHED_MODEL_MOUNT} ' /proc/mounts"
        said = await claimed.kubectl("exec", "claimed-0-0-0", "--", "sh", "-c", inside)
        assert re.match(rf"GGUF\S+ {CACHED_MODEL_MOUNT} \S+ ro,", said), said
    await hub.stop()


async def test_gpus_are_requested_and_too_many_are_reported_with_the_numbers(
    own_node: Node, real_stage: Stage, stage_namespace: str
) -> None:
    patch = json.dumps([{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "2"}])
    own_node.kubectl("patch", "node", own_node.name, "--subresource=status", "--type=json", "-p", patch)
    wait_until(lambda: own_node.get("node", own_node.name)["status"]["allocatable"].get(GPU) == "2", "two GPUs")
    fits, too_many = (Resource(real_stage.cluster, stage_namespace, name) for name in ("fits", "too-many"))
    for resource, ranks in ((fits, 1), (too_many, 3)):
        pods = {"device": "cuda", "ranksPerPod": ranks, "resources": {"requests": {"cpu": 0}}}
        spec = {"model": {"source": {"path": MODEL}}, "pods": pods}
        await resource.apply({**manifest(resource.name), "spec": {**spec, "parallelism": {"tensor": ranks}}})
    asked = await fits.until_found("pod", "fits-0-0-0", lambda pod: pod["spec"].get("nodeName") == own_node.name)
    assert asked["spec"]["containers"][0]["resources"]["limits"] == {GPU: "1"}
    status = await too_many.until(lambda status: reason(status) == "Unschedulable", "a reason")
    message = condition(status, "Ready")["message"]
    assert f"0/1 nodes are available: 1 Insufficient {GPU}" in message, message
    for resource in (fits, too_many):
        await resource.kubectl("delete", "mi", resource.name, "--timeout=50s")


async def test_requests_through_the_activator_start_an_idle_model_and_all_are_answered(
    real_stage: Stage, stage_namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--set", "activator.enabled=true", "--set", "activator.replicas=1")
    await asyncio.to_thread(real_stage.upgrade, *flags)
    seldom = Resource(real_stage.cluster, stage_namespace, "seldom")
    resource = yaml.safe_load((SAMPLES / "smollm2.yaml").read_text())
    resource["metadata"]["name"] = resource["spec"]["model"]["servedName"] = seldom.name
    resource["spec"] |= {"replicas": 1, "autoSuspend": {"idleAfter": "1s", "stopAfter": "1s"}}
    await seldom.kubectl("apply", "--validate=false", "-f", "-", input=json.dumps(resource))
    await seldom.until(lambda status: reason(status) == "IdleStopped", "the stop", within=300)
    await seldom.until_pods(within=SECONDS_TO_REMOVE_A_POD)
    with PortForward(seldom.cluster, NAMESPACE, ACTIVATOR, 8080, tmp_path) as forwarded:
        url = f"{forwarded.url}/{stage_namespace}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=300) as client:
            listed = {model.id: model.to_dict()["availability"] async for model in client.models.list()}
            assert listed[seldom.name] == "Idle"
            answers = await asyncio.gather(*(first_token_and_text(client, seldom.name) for _ in range(8)))
    assert [text for _, text in answers] == ["The capital of France is Paris."] * 8
    with capsys.disabled():
        print(f"\nfirst token of SmolLM2 {min(first for first, _ in answers):.1f} s after a request without pods")
    await seldom.kubectl("delete", "mi", seldom.name, "--timeout=50s")


async def test_an_uninstalled_release_leaves_only_the_definition(real_stage: Stage, sample: Resource) -> None:
    await sample.kubectl("delete", "mi", sample.name, "--timeout=50s")
    await sample.until_gone("pods", "services", "secrets", "networkpolicies", within=SECONDS_TO_REMOVE_A_POD)
    real_stage.uninstall()
    wait_until(lambda: not real_stage.operator_pods(), "the operator's pod to go", SECONDS_TO_REMOVE_A_POD)
    selector = "app.kubernetes.io/instance=megatron"
    kinds = "deployments,services,serviceaccounts,networkpolicies,clusterroles,clusterrolebindings,roles,rolebindings"
    words = ("get", kinds, "-n", NAMESPACE, "-l", selector, "-o", "name", "--ignore-not-found")
    assert real_stage.cluster.kubectl(*words) == ""
