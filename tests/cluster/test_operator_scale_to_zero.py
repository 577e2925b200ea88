"""Scale to zero: an idle model has no pods until a request reaches an activator, and no request is lost meanwhile."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, get_unused_port_socket
from chart_support.helm import Helm
from cluster_support import audit
from cluster_support.audit import Right
from cluster_support.control_plane import ControlPlane
from operator_support.activator_account import activator_kubeconfig
from operator_support.api import Api
from operator_support.operator_process import OperatorProcess
from operator_support.process_node import ProcessNode
from operator_support.resource import Resource, reason
from operator_support.scripted_node import ScriptedNode
from runtime_support.adapters import write_adapter
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell
from transformers import AutoModelForCausalLM

from megatron_operator.activator.limits import Limits
from megatron_operator.activator.service import Activator
from megatron_operator.kubernetes.api_server import ApiServer

FIRST, SECOND = "chat-0-0-0", "chat-0-1-0"
IDLE = {"idleAfter": "1s", "stopAfter": "1s"}
RIGHTS = {
    Right("inference.megatron.dev", "megatroninferences", "get"),
    Right("inference.megatron.dev", "megatroninferences/status", "patch"),
    Right("", "secrets", "get"),
}
SERVICE = "http://megatron-megatron-inference-activator.megatron-system.svc:8080"
KEYS = {"apiKeysSecret": {"name": "users"}}
KEY = {"Authorization": "Bearer first"}


class Model:
    """The server of a model, which is not open yet, behind two activators with the permissions of the chart."""

    def __init__(self) -> None:
        self._socket = get_unused_port_socket("127.0.0.1")
        """Bound from the beginning, so that no other process takes the port before the server listens."""
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.server: TestServer | None = None
        self.clients: list[httpx.AsyncClient] = []

    async def open(self) -> None:
        application = web.Application()
        application.router.add_post("/v1/completions", self._answer)
        self.server = TestServer(application, host="127.0.0.1", socket_factory=lambda *_: self._socket)
        await self.server.start_server()

    async def close(self) -> None:
        if self.server is not None:
            await self.server.close()
        self._socket.close()

    async def _answer(self, request: web.Request) -> web.Response:
        return web.json_response({"text": (await request.json())["prompt"]})


@pytest.fixture
async def model(
    chat: Resource,
    helm: Helm,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Model]:
    await chat.kubectl("create", "secret", "generic", "users", "--from-literal=api-keys=first")
    kubeconfig = await activator_kubeconfig(chat, helm, "--set=activator.apiKeySecrets={users}")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    model = Model()
    async with AsyncExitStack() as stack:
        for _ in range(2):
            api = await ApiServer.connect()
            stack.push_async_callback(api.close)
            activator = Activator(api, Limits(keep_alive=0.5), url_of=lambda _: model.url)
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
    await chat.create(autoSuspend=IDLE, frontend=KEYS)
    first = (await chat.until_pods(FIRST))[FIRST]
    launcher = await stage.run(first)
    await stage.make_ready(first)
    await chat.until_phase("Running")
    launcher.state.update(auto_suspended=True)
    launcher.enter("SUSPENDED")
    await chat.until(lambda status: reason(status) == "IdleStopped", "the stop")
    await chat.until_pods()


async def restart(operator: OperatorProcess, chat: Resource) -> None:
    """Kills the operator and starts it; returns when it has made a round of the resource."""
    await asyncio.to_thread(operator.kill)
    await chat.patch({"failurePolicy": {"maxRestarts": 6}})
    await asyncio.to_thread(operator.start)
    generation = (await chat.get("mi", "chat"))["metadata"]["generation"]
    await chat.until(lambda status: status["observedGeneration"] == generation, "the operator")


async def test_requests_start_an_idle_model_and_all_are_answered(
    chat: Resource, stage: ScriptedNode, model: Model, operator: OperatorProcess, own_control_plane: ControlPlane
) -> None:
    await stopped(chat, stage)
    await restart(operator, chat)
    refused = [await client.post("completions", json={}, headers={"X-Api-Key": "wrong"}) for client in model.clients]
    assert [answer.status_code for answer in refused] == [401, 401]
    assert "activationTime" not in await chat.status()
    assert await chat.pods() == {}
    requests = [
        asyncio.create_task(client.post("completions", json={"prompt": f"{index}"}, headers=KEY))
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
    await chat.events("IdleStopped", "Activated")
    used = list(audit.requests_of(own_control_plane.logs, "activator", chat.namespace))
    assert {request.right for request in used} == RIGHTS
    assert {request.status for request in used} == {200}


@pytest.mark.timeout(300)
async def test_a_streamed_request_starts_the_real_runtime(
    chat: Resource, api: Api, model: Model, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ProcessNode(api, chat.namespace, tmp_path / "pods", tiny_checkpoint.parent) as machine:
        await chat.create(model={"source": {"path": f"/models/{tiny_checkpoint.name}"}}, autoSuspend=IDLE)
        await chat.until(lambda status: reason(status) == "IdleStopped", "the stop", within=120)
        model.url = f"http://{await machine.service_address('chat')}:8000"
        lines: list[str] = []
        began = time.monotonic()
        body = {"model": "chat", "prompt": "a", "max_tokens": 4, "stream": True}
        async with model.clients[0].stream("POST", "completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and not any(each.startswith("data: ") for each in lines):
                    first = time.monotonic() - began
                lines += [line] if line else []
        with capsys.disabled():
            print(f"\nfirst token {first:.1f} s after the request")
        assert lines[0] == ": waiting for the model to start"
        assert lines[-1] == "data: [DONE]"
        await chat.kubectl("delete", "mi", "chat", "--timeout=60s")


@pytest.mark.timeout(300)
async def test_a_request_for_an_adapter_and_that_of_the_docs_start_the_real_runtime(
    chat: Resource, api: Api, model: Model, tiny_checkpoint: Path, tmp_path: Path, reader: DocShell
) -> None:
    (ask,) = documented("docs/http-api.md", "curl http://megatron-megatron-inference-activator")
    base = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    write_adapter(tmp_path / "models" / "sql", base)
    (tmp_path / "models" / "tiny").symlink_to(tiny_checkpoint)
    adapters = [{"name": "sql", "path": "/models/sql"}]
    async with ProcessNode(api, chat.namespace, tmp_path / "pods", tmp_path / "models") as machine:
        short = {"source": {"path": "/models/tiny"}, "maxSequenceLength": 64}
        await chat.create(model=short, autoSuspend=IDLE, adapters=adapters)
        await chat.until(lambda status: reason(status) == "IdleStopped", "the stop", within=120)
        model.url = f"http://{await machine.service_address('chat')}:8000"
        body = {"prompt": "water", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        endpoint, answers = model.clients[0].base_url.join(f"/{chat.namespace}/v1/"), {}
        for name in ("sql", "chat"):
            answer = await model.clients[0].post(endpoint.join("completions"), json={"model": name, **body})
            assert answer.status_code == 200, answer.text
            answers[name] = answer.json()["choices"][0]["token_ids"]
        assert answers["sql"] != answers["chat"]
        url = str(endpoint.join(f"/{chat.namespace}/"))
        command = ask.command.replace(f"{SERVICE}/models/", url).replace('"smollm2"', '"chat"')
        assert json.loads(await asyncio.to_thread(reader.run, command))["choices"][0]["message"]["role"] == "assistant"
        listed, own = [
            (await model.clients[0].get(url)).json()["data"]
            for url in (endpoint.join("models"), f"{model.url}/v1/models")
        ]
        assert [each["id"] for each in listed] == ["chat", "sql"]
        assert own[1].keys() - {"max_model_len"} <= listed[1].keys()
        shared = ("id", "object", "owned_by", "parent")
        assert [listed[1][field] for field in shared] == [own[1][field] for field in shared]
        assert (listed[1]["root"], own[1]["root"]) == ("/models/sql", str(tmp_path / "models" / "sql"))
        await chat.kubectl("delete", "mi", "chat", "--timeout=60s")
