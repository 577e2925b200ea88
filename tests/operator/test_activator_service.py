"""Bodies, drain and metrics of the activator, with real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web
from planning_support import activating
from planning_support.activating import CHAT, Client, ModelInCluster, shorten_times

from megatron_operator.activator import service
from megatron_operator.activator.limits import Limits


@pytest.fixture
async def model(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelInCluster]:
    shorten_times(monkeypatch)
    model = ModelInCluster()
    yield model
    await model.stop()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("limits", "status"), [({"body_bytes": 100}, 413), ({"total_body_bytes": 100, "address_share": 1.0}, 503)]
)
async def test_bodies_beyond_the_limits_are_refused(
    model: ModelInCluster, chunked: bool, limits: dict[str, float], status: int
) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"x" * 1000

    await model.start()
    async with Client(model, Limits(**limits)) as client:
        refused = await client.http.post(CHAT, content=parts() if chunked else b"x" * 1000)
        assert (refused.status_code, refused.headers.get("Retry-After")) == (status, "10" if status == 503 else None)
        assert (await client.http.post(CHAT, content=b"x" * 100)).status_code == 200
        assert client.activator.usage.body_bytes == 0
    assert len(model.requests) == 1


async def test_the_bytes_of_a_body_are_free_when_its_answer_begins(model: ModelInCluster) -> None:
    ends = asyncio.Event()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        await ends.wait()
        return response

    model.answer = half
    await model.start()
    async with Client(model) as client, client.http.stream("POST", CHAT, content=b"x" * 1000) as got:
        async for _ in got.aiter_bytes():
            assert client.activator.usage.body_bytes == 0
            ends.set()


async def test_a_request_during_a_drain_is_answered_and_its_connection_closed(
    model: ModelInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ENDPOINT_SECONDS", 60.0)
    await model.start()
    async with Client(model) as client:
        assert "Connection" not in (await client.ask()).headers
        client.stop.set()
        await asyncio.sleep(0)
        drained = await client.ask()
        async with httpx.AsyncClient(base_url=client.http.base_url, trust_env=False) as other:
            late = await other.post(CHAT)
        client.served.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.served
        client.served = asyncio.create_task(asyncio.sleep(0))
    assert (drained.status_code, drained.headers["Connection"]) == (200, "close")
    assert (late.status_code, late.headers["Connection"]) == (200, "close")


async def test_requests_that_wait_are_answered_after_the_end_of_the_port(
    model: ModelInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activating, "SHORT", 60.0)
    model.become_idle()
    async with Client(model) as client:
        answer = asyncio.create_task(client.ask())
        await model.activated.wait()
        client.stop.set()
        while True:
            try:
                async with httpx.AsyncClient(base_url=client.http.base_url, trust_env=False) as other:
                    await other.get("/healthz")
            except httpx.ConnectError:
                break
        await model.start()
        model.become_ready()
        assert (await answer).status_code == 200


async def test_requests_are_counted_by_resource_and_status(model: ModelInCluster) -> None:
    model.become_idle()
    of_chat = {"namespace": "models", "megatroninference": "chat"}
    async with Client(model) as client:
        answer = asyncio.create_task(client.http.post(CHAT, content=b"text"))
        await client.until_held(1)
        assert client.metric("megatron_activator_waiting_requests", **of_chat) == 1
        assert client.metric("megatron_activator_body_bytes") == 4
        await model.start()
        model.become_ready()
        await answer
        await client.http.get("/elsewhere/chat/v1")
        assert client.metric("megatron_activator_waiting_requests", **of_chat) == 0
        assert client.metric("megatron_activator_body_bytes") == 0
        assert client.metric("megatron_activator_starts_total", **of_chat) == 1
        assert client.metric("megatron_activator_wait_seconds_count") == 1
        assert client.metric("megatron_activator_requests_total", **of_chat, status="200") == 1
        nowhere = {"namespace": "", "megatroninference": ""}
        assert client.metric("megatron_activator_requests_total", **nowhere, status="404") == 1
