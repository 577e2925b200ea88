"""Requests without a key are refused by their headers on every path: the server waits for no body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from runtime_support.http_servers import serving
from starlette.routing import Route

from megatron_runtime.launch import control_api
from megatron_runtime.launch.control_api import create_control_api
from megatron_runtime.launch.pod_state import PodFacts, PodState
from megatron_runtime.server.adapter_routes import MAX_BODY_BYTES
from megatron_runtime.server.api_keys import digest
from megatron_runtime.server.app import create_app
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.http_server import HttpServer

KEY, TOKEN = "key-of-a-client", "token-of-the-operator"
OPEN = {"/ping", "/v1/ping"}
"""Probes."""
CONTROL_PATHS = {"/v1/lead", "/v1/step-down", "/v1/weights", "/v1/{signal}"}
BODY_SECONDS = 0.5
"""A server that waits for a body answers with 408 then."""


def posts(app: FastAPI) -> list[str]:
    """All paths of the app for POST."""
    return [route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())]


async def answer(address: tuple[str, int], head: str, body: bytes = b"") -> bytes:
    """The first line of the response to a request whose body does not end."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(head.encode() + body)
        return await reader.readline()
    finally:
        writer.close()


def head(path: str, **headers: Any) -> str:
    lines = {"host": "127.0.0.1", "content-type": "application/json", "content-length": 60_000, **headers}
    return f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"


@pytest.fixture
def frontend(make_context: Callable[..., FrontendContext]) -> FastAPI:
    """The app of a frontend that needs a key, with all routes."""
    return create_app(make_context([KEY], digest(TOKEN).hex(), megatron_http=True, body_timeout=BODY_SECONDS))


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """The control API of a pod that leads."""
    monkeypatch.setattr(control_api, "BODY_SECONDS", BODY_SECONDS)
    return create_control_api(PodState(PodFacts(is_leader=True)), lambda: None, token=TOKEN, metrics=lambda: b"")


async def test_a_frontend_refuses_by_the_headers_on_every_path(frontend: FastAPI) -> None:
    paths = posts(frontend)
    assert {"/v1/completions", "/completions", "/v1/load_lora_adapter", "/sleep", "/tokenize"} <= set(paths)
    async with serving(HttpServer(frontend)) as address:
        answers = {path: await answer(address, head(path)) for path in paths}
    assert {path for path, line in answers.items() if line.startswith(b"HTTP/1.1 401 ")} == set(paths) - OPEN


async def test_a_control_api_refuses_by_the_headers_on_every_path(control: FastAPI) -> None:
    paths = posts(control)
    assert set(paths) >= CONTROL_PATHS
    async with serving(HttpServer(control)) as address:
        answers = {path: await answer(address, head(path)) for path in paths}
        malformed = {path: await answer(address, head(path, **{"content-length": 4}), b"{bad") for path in paths}
    assert {line for line in (answers | malformed).values() if not line.startswith(b"HTTP/1.1 401 ")} == set()


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_the_body_of_an_adapter_is_small(frontend: FastAPI, path: str) -> None:
    async with serving(HttpServer(frontend)) as address:
        token = {"authorization": f"Bearer {TOKEN}"}
        within, beyond = b'{"lora_name": ""}'.ljust(MAX_BODY_BYTES), b"{".ljust(MAX_BODY_BYTES + 1)
        refused = await answer(address, head(path, **token, **{"content-length": len(within)}), within)
        too_large = await answer(address, head(path, **token, **{"content-length": 2 * len(beyond)}), beyond)
    assert (refused[9:12], too_large[9:12]) == (b"400", b"413")
