"""A model behind an activator: an API server in memory, and real connections."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, get_unused_port_socket, unused_port
from planning_support.resources import resource_object

from megatron_operator.activator import models, proxy, service
from megatron_operator.activator.limits import Limits
from megatron_operator.activator.meters import ActivatorMeters
from megatron_operator.activator.models import ModelKey
from megatron_operator.activator.service import Activator, Served
from megatron_operator.observed_state import ActionRefused, AdapterError

CHAT = "/models/chat/v1/chat/completions"
STOPPED_AT = "2026-11-24T10:00:00Z"
READY = [{"type": "Ready", "status": "True", "reason": "EngineRunning", "lastTransitionTime": STOPPED_AT}]
UNREADY = [{**READY[0], "status": "False", "reason": "IdleStopped"}]
SHORT = 0.05


def shorten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait look often, and neither a drain nor the rest of a refused body takes time."""
    monkeypatch.setattr(proxy, "POLL", 0.02)
    monkeypatch.setattr(models, "POLL", 0.0)
    monkeypatch.setattr(service, "ENDPOINT_SECONDS", 0.0)
    monkeypatch.setattr(service, "LAST_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(service, "LINGERING_SECONDS", SHORT)


def secret_object(secrets: Mapping[str, Mapping[str, str]] | None, name: str) -> Mapping[str, Any] | None:
    """The Secret of this name; None for ``secrets``: none may be read."""
    if secrets is None:
        raise ActionRefused("secrets is forbidden")
    if (values := secrets.get(name)) is None:
        return None
    return {"data": {key: base64.b64encode(text.encode()).decode() for key, text in values.items()}}


class ModelInCluster:
    """A resource in an API server, and the server of its model on a port that may be closed."""

    def __init__(self) -> None:
        self.resource: dict[str, Any] | None = resource_object()
        self.resource["status"] = {"conditions": READY}
        self.reads = 0
        self.secrets: dict[str, dict[str, str]] | None = {}
        """Their values by name and key; None: the activator may not read any."""
        self.is_down = False
        self.activated = asyncio.Event()
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self._socket = get_unused_port_socket("127.0.0.1")
        """Bound from the beginning, so that no other process takes the port before the server listens."""
        self.port = self._socket.getsockname()[1]
        self.answer: Callable[[web.Request], Any] = self.echo
        self._server: TestServer | None = None

    async def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
        self.reads += 1
        if self.is_down:
            raise AdapterError("the API server cannot be reached")
        if kind == "Secret":
            return self._secret(name)
        return self.resource if (namespace, name) == ("models", "chat") else None

    async def select(self, _kind: str, namespace: str, _selector: str) -> list[Mapping[str, Any]]:
        return [self.resource] if self.resource is not None and namespace == "models" else []

    def _secret(self, name: str) -> Mapping[str, Any] | None:
        return secret_object(self.secrets, name)

    async def patch_status(self, obj: Mapping[str, Any], patch: Mapping[str, Any]) -> Mapping[str, Any] | None:
        assert self.resource is not None
        assert obj["metadata"]["uid"] == self.resource["metadata"]["uid"]
        self.resource["status"] |= patch
        self.activated.set()
        return self.resource

    def url(self, key: ModelKey) -> str:
        assert key == ModelKey("models", "chat")
        return f"http://127.0.0.1:{self.port}"

    def become_idle(self) -> None:
        assert self.resource is not None
        self.resource["status"] = {"conditions": UNREADY, "idleStopTime": STOPPED_AT}

    def become_ready(self) -> None:
        assert self.resource is not None
        self.resource["status"] = {"conditions": READY, "activationTime": self.resource["status"].get("activationTime")}

    async def start(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._take)
        self._server = TestServer(application, host="127.0.0.1", socket_factory=lambda *_: self._socket)
        await self._server.start_server()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
        self._socket.close()

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path_qs, dict(request.headers), await request.read()))
        response: web.StreamResponse = await self.answer(request)
        return response

    async def echo(self, request: web.Request) -> web.Response:
        return web.json_response({"path": request.path_qs, "method": request.method}, headers={"X-Model": "chat"})


class Client:
    """A client of an activator with these limits."""

    def __init__(self, model: ModelInCluster, limits: Limits | None = None, namespaces: tuple[str, ...] = ()) -> None:
        self.meters = ActivatorMeters()
        self.activator = Activator(model, limits or Limits(), Served(namespaces), model.url, self.meters)

    async def __aenter__(self) -> Client:
        self.stop, port = asyncio.Event(), unused_port()
        served = service.serve(self.activator, "127.0.0.1", port, self.stop, grace=SHORT)
        self.served = asyncio.create_task(served)
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        while True:
            try:
                await self.http.get("/healthz")
                return self
            except httpx.ConnectError:
                await asyncio.sleep(0.01)

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        self.stop.set()
        await self.served

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.http.post(CHAT, json=body)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.meters.registry.get_sample_value(name, labels)

    async def until_held(self, count: int) -> None:
        while self.activator.usage.requests != count:  # noqa: ASYNC110  # nothing reports it
            await asyncio.sleep(0.01)
