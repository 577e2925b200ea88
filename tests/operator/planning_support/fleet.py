"""Many models behind one endpoint of an activator: an API server in memory, and a server for each model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from aiohttp import web
from aiohttp.test_utils import TestServer
from planning_support.activating import READY, STOPPED_AT, UNREADY, secret_object
from planning_support.resources import resource_object

from megatron_operator.activator.limits import Limits
from megatron_operator.activator.models import ModelKey
from megatron_operator.activator.service import Activator, Served
from megatron_operator.observed_state import AdapterError

Object = dict[str, Any]


class Fleet:
    """Resources by name in the namespace ``models``, and their servers, which answer with the name of the resource."""

    def __init__(self) -> None:
        self.resources: dict[str, Object] = {}
        self.secrets: dict[str, dict[str, str]] | None = {}
        """Their values by name and key; None: the activator may not read any."""
        self.selectors: list[str] = []
        """Of the lists that were read."""
        self.is_down = False
        self.activated = asyncio.Event()
        self.left = asyncio.Event()
        """A client left before its answer was complete."""
        self.requests: list[tuple[str, str, bytes]] = []
        """Resource, path and body of each."""
        self._servers: dict[str, TestServer] = {}

    async def add(self, name: str, served_name: str | None = None, *, idle: bool = False, **spec: Any) -> None:
        """A model, which runs unless it is idle."""
        obj = resource_object(name, **spec)
        obj["metadata"] |= {"creationTimestamp": f"2026-11-24T10:00:{len(self.resources):02}Z"}
        obj["spec"]["model"] |= {"servedName": served_name} if served_name else {}
        self.resources[name] = obj
        if idle:
            obj["status"] = {"conditions": UNREADY, "idleStopTime": STOPPED_AT}
        else:
            await self.start(name)

    async def start(self, name: str) -> None:
        """The server of a model, whose resource is then ready."""
        self.resources[name]["status"] = {"conditions": READY}

        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._answer(name, request)

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        self._servers[name] = TestServer(application, host="127.0.0.1")
        await self._servers[name].start_server()

    async def stop(self) -> None:
        for server in self._servers.values():
            await server.close()

    async def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any] | None:
        self._check()
        if kind == "Secret":
            return secret_object(self.secrets, name)
        return self.resources.get(name) if namespace == "models" else None

    async def select(self, _kind: str, namespace: str, selector: str) -> Sequence[Mapping[str, Any]]:
        self._check()
        self.selectors.append(selector)
        return list(self.resources.values()) if namespace == "models" else []

    async def patch_status(self, obj: Mapping[str, Any], patch: Mapping[str, Any]) -> Mapping[str, Any] | None:
        self.resources[obj["metadata"]["name"]]["status"] |= patch
        self.activated.set()
        return obj

    def url(self, key: ModelKey) -> str:
        server = self._servers.get(key.name)
        return f"http://127.0.0.1:{server.port if server else 1}"

    def _check(self) -> None:
        if self.is_down:
            raise AdapterError("the API server cannot be reached")

    async def _answer(self, name: str, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((name, request.path_qs, body))
        if b'"stream": true' not in body:
            return web.json_response({"answered_by": name})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response


class EndpointClient:
    """A client of an activator."""

    def __init__(self, fleet: Fleet, served: Served | None = None, limits: Limits | None = None) -> None:
        self._activator = Activator(fleet, limits or Limits(), served or Served(("models",)), fleet.url)

    async def __aenter__(self) -> httpx.AsyncClient:
        self._server = TestServer(self._activator.application(), host="127.0.0.1")
        await self._server.start_server()
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._server.port}", timeout=60, trust_env=False)
        return self._http

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._server.close()
