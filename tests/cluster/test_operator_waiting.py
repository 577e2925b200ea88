"""Resources that wait for nodes cause almost no requests to the API server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cluster_support.cluster import Cluster
from kubernetes.aio import client, config
from operator_support.api import Api
from operator_support.operator_process import OperatorProcess
from operator_support.resource import Resource, reason
from operator_support.scripted_node import ScriptedNode

from megatron_operator.kubernetes import resource_loop
from megatron_operator.kubernetes.api_server import ApiServer
from megatron_operator.kubernetes.resource_loops import ResourceLoops
from megatron_operator.metrics import Meters
from megatron_operator.settings import Settings

RESYNC = 0.5
MESSAGE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"


class CountedApi(ApiServer):
    """Records the requests."""

    def __init__(self, api: Any) -> None:
        super().__init__(api)
        self.requests: list[str] = []

    async def _request(self, method: str, path: str, *args: Any, **rest: Any) -> dict[str, Any]:
        self.requests.append(f"{method} {path}")
        return await super()._request(method, path, *args, **rest)


async def nothing_to_watch(kind: str) -> None:
    raise AssertionError(f"there is no {kind} to be watched")


@pytest.fixture
async def api_server(
    operator: OperatorProcess, installed: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[CountedApi]:
    """Replaces the operator's process, to count its requests."""
    monkeypatch.setattr(resource_loop, "RESYNC", RESYNC)
    await asyncio.to_thread(operator.stop)
    configuration = client.Configuration()
    kubeconfig = str(installed.kubeconfig)
    await config.load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)
    api = CountedApi(client.ApiClient(configuration))
    try:
        yield api
    finally:
        await api.close()


async def test_a_resource_that_waits_for_a_node_is_checked_for_its_keys_alone(
    chat: Resource, stage: ScriptedNode, api: Api, api_server: CountedApi
) -> None:
    stage.full = True
    loops = ResourceLoops(api_server, Settings(), Meters(), nothing_to_watch)
    loops.start_leading()
    try:
        await chat.create()
        path = f"/apis/inference.megatron.dev/v1alpha1/namespaces/{chat.namespace}/megatroninferences/chat"
        loops.resource_changed(await api.get(path))
        (pod,) = (await chat.until_pods("chat-0-0-0")).values()
        await stage.find_no_place(pod, MESSAGE)
        await chat.until(lambda status: reason(status) == "Unschedulable", "the scheduler's message")
        keys = f"GET /api/v1/namespaces/{chat.namespace}/secrets/chat-keys"
        while api_server.requests[-4:] != [keys] * 4:  # noqa: ASYNC110  # nothing reports it
            await asyncio.sleep(RESYNC)
        await chat.kubectl("delete", "secret", "chat-keys")
        await chat.until_pods("chat-0-1-0")
    finally:
        await loops.close()
