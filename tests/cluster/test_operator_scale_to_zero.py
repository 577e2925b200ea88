"""Scale to zero: an idle model has no pods until a request reaches an activator, and no request is lost meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from chart_support.helm import Helm, of_kind
from cluster_support import audit
from cluster_support.audit import Right
from cluster_support.cluster import Cluster
from cluster_support.control_plane import ControlPlane
from operator_support.fixtures import ACCOUNT, SYSTEM
from operator_support.operator_process import OperatorProcess, in_the_place_of
from operator_support.resource import Resource, reason
from operator_support.scripted_node import ScriptedNode

from megatron_operator.activator.limits import Limits
from megatron_operator.activator.models import Models
from megatron_operator.activator.service import Activator
from megatron_operator.kubernetes.api_server import ApiServer

FIRST, SECOND = "chat-0-0-0", "chat-0-1-0"
IDLE = {"idleAfter": "1s", "stopAfter": "1s"}
RIGHTS = {
    Right("inference.megatron.dev", "megatroninferences", "get"),
    Right("inference.megatron.dev", "megatroninferences/status", "patch"),
}


@pytest.fixture
def activated(operator: OperatorProcess, installed: Cluster, tmp_path: Path) -> Iterator[None]:
    """An operator of a release with activators."""
    kubeconfig = installed.kubeconfig_for(ACCOUNT, SYSTEM)
    settings = {"MEGATRON_ACTIVATOR": "true"}
    with in_the_place_of(operator, OperatorProcess(kubeconfig, tmp_path / "operator.log", settings=settings)):
        yield


class Model:
    """The server of a model, which is not open yet, behind two activators with the permissions of the chart."""

    def __init__(self) -> None:
        self.port = unused_port()
        self.server: TestServer | None = None
        self.clients: list[httpx.AsyncClient] = []

    async def open(self) -> None:
        application = web.Application()
        application.router.add_post("/v1/completions", self._answer)
        self.server = TestServer(application, host="127.0.0.1", port=self.port)
        await self.server.start_server()

    async def close(self) -> None:
        if self.server is not None:
            await self.server.close()

    async def _answer(self, request: web.Request) -> web.Response:
        return web.json_response({"text": (await request.json())["prompt"]})


@pytest.fixture
async def model(
    chat: Resource,
    helm: Helm,
    installed: Cluster,
    activated: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Model]:
    roles = of_kind(helm.template("--set=activator.enabled=true"), "ClusterRole")
    (rules,) = [role["rules"] for role in roles if role["metadata"]["name"].endswith("-activator")]
    await chat.kubectl("create", "serviceaccount", "activator")
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "activator"}}
    await chat.apply({**role, "rules": rules})
    subject = f"--serviceaccount={chat.namespace}:activator"
    await chat.kubectl("create", "rolebinding", "activator", "--role=activator", subject)
    monkeypatch.setenv("KUBECONFIG", str(installed.kubeconfig_for("activator", chat.namespace)))
    model = Model()
    async with AsyncExitStack() as stack:
        for _ in range(2):
            api = await ApiServer.connect()
            stack.push_async_callback(api.close)
            activator = Activator(Models(api), Limits(keep_alive=0.5), (), lambda _: f"http://127.0.0.1:{model.port}")
            server = TestServer(activator.application(), host="127.0.0.1")
            await server.start_server()
            stack.push_async_callback(server.close)
            base_url = f"http://127.0.0.1:{server.port}/{chat.namespace}/chat/v1"
            model.clients.append(
                await stack.enter_async_context(httpx.AsyncClient(base_url=base_url, timeout=120, trust_env=False))
            )
        stack.push_async_callback(model.close)
        yield model


async def stopped(chat: Resource, stage: ScriptedNode) -> None:
    """A model that served, and was stopped because it was idle."""
    await chat.create(autoSuspend=IDLE)
    first = (await chat.until_pods(FIRST))[FIRST]
    launcher = await stage.run(first)
    await stage.make_ready(first)
    await chat.until_phase("Running")
    launcher.state.update(auto_suspended=True)
    launcher.enter("SUSPENDED")
    await chat.until(lambda status: reason(status) == "IdleStopped", "the stop")
    await chat.until_pods()


async def test_requests_start_an_idle_model_and_all_are_answered(
    chat: Resource, stage: ScriptedNode, model: Model, own_control_plane: ControlPlane
) -> None:
    await stopped(chat, stage)
    requests = [
        asyncio.create_task(client.post("completions", json={"prompt": f"{index}"}))
        for client in model.clients
        for index in range(10)
    ]
    second = (await chat.until_pods(SECOND))[SECOND]
    await stage.run(second)
    await stage.make_ready(second)
    await chat.until_phase("Running")
    await model.open()
    answers = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers] == [200] * 20
    assert sorted(answer.json()["text"] for answer in answers) == sorted([f"{index}" for index in range(10)] * 2)
    status = await chat.status()
    assert "idleStopTime" not in status
    assert {"IdleStopped", "Activated"} <= {event["reason"] for event in (await chat.get("events"))["items"]}
    used = list(audit.requests_of(own_control_plane.logs, "activator", chat.namespace))
    assert {request.right for request in used} == RIGHTS
    assert {request.status for request in used} == {200}


async def test_a_stopped_model_stays_stopped_when_the_operator_restarts(
    chat: Resource, stage: ScriptedNode, operator: OperatorProcess, installed: Cluster, tmp_path: Path
) -> None:
    kubeconfig, settings = installed.kubeconfig_for(ACCOUNT, SYSTEM), {"MEGATRON_ACTIVATOR": "true"}
    ours = OperatorProcess(kubeconfig, tmp_path / "operator.log", settings=settings)
    with in_the_place_of(operator, ours):
        await stopped(chat, stage)
        await asyncio.to_thread(ours.kill)
        await asyncio.to_thread(ours.start)
        await chat.kubectl("annotate", "mi", "chat", "tests/look=again")
        second = Resource(chat.cluster, chat.namespace, "second")
        await second.create()
        await second.until_pods("second-0-0-0")  # The operator works again.
        assert await chat.pods() == {}
