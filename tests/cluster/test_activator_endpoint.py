"""One endpoint for many models: the real process of an activator, with the permissions of the chart."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp.test_utils import unused_port
from chart_support.helm import Helm
from cluster_support import audit
from cluster_support.audit import Right
from cluster_support.cluster import Cluster
from cluster_support.control_plane import ControlPlane
from operator_support.activator_account import activator_kubeconfig
from operator_support.resource import Resource, manifest

TEAM = {"team": "a"}


@pytest.fixture
def models(installed: Cluster, namespace: str) -> Resource:
    """A namespace without an operator."""
    return Resource(installed, namespace)


@asynccontextmanager
async def activator(kubeconfig: Path, port: int, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "megatron_operator.cli", "activate", f"--port={port}", "--host=127.0.0.1", *flags)
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "MEGATRON_LOG_FORMAT": "json"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def answer(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """The answer, as soon as the process serves."""
    while True:
        try:
            return await client.get(path)
        except httpx.ConnectError:
            await asyncio.sleep(0.1)


async def test_an_endpoint_lists_the_models_that_its_selector_selects(
    models: Resource, helm: Helm, own_control_plane: ControlPlane
) -> None:
    for name, labels, served_name in (("one", TEAM, "chat"), ("two", TEAM, "chat"), ("three", {}, "other")):
        obj = manifest(name, model={"source": {"path": "/models/m.gguf"}, "servedName": served_name})
        obj["metadata"]["labels"] = labels
        await models.apply(obj)
    kubeconfig = await activator_kubeconfig(models, helm)
    port, metrics = unused_port(), unused_port()
    flags = (f"--namespace={models.namespace}", "--selector=team in (a, b)", f"--metrics-port={metrics}")
    async with (
        activator(kubeconfig, port, *flags),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        (listed,) = (await answer(client, "/v1/models")).json()["data"]
        unknown = await client.post("/v1/completions", json={"model": "other"})
        series = (await client.get(f"http://127.0.0.1:{metrics}/metrics")).text
    assert (listed["id"], listed["availability"]) == ("chat", "Waiting")
    assert {listed["resource"], *(f"{models.namespace}/{each}" for each in listed["duplicates"])} == {
        f"{models.namespace}/one",
        f"{models.namespace}/two",
    }
    assert unknown.status_code == 404
    assert "the models are 'chat'" in unknown.json()["error"]["message"]
    assert 'megatron_activator_requests_total{megatroninference="",namespace="",status="404"} 1.0' in series
    used = list(audit.requests_of(own_control_plane.logs, "activator", models.namespace))
    assert {request.right for request in used} == {Right("inference.megatron.dev", "megatroninferences", "list")}
    assert {request.status for request in used} == {200}


async def test_a_selector_that_is_wrong_is_named_at_the_start(models: Resource, helm: Helm) -> None:
    kubeconfig = await activator_kubeconfig(models, helm)
    flags = (f"--namespace={models.namespace}", "--selector=team in a")
    async with activator(kubeconfig, unused_port(), *flags) as process:
        assert process.stderr is not None
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 2
    assert "cannot start: --selector team in a: " in said
    assert "Traceback" not in said
