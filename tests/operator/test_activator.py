"""The activator, with real connections to a model's server and an API server in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web
from planning_support.activating import CHAT, SHORT, STOPPED_AT, Client, ModelInCluster, shorten_times

from megatron_operator.activator import models, proxy
from megatron_operator.activator.limits import Limits

WAITING = b": waiting for the model to start\n\n"


@pytest.fixture
async def model() -> AsyncIterator[ModelInCluster]:
    model = ModelInCluster()
    yield model
    await model.stop()


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_times(monkeypatch)


async def test_a_request_to_a_running_model_passes_unchanged(model: ModelInCluster) -> None:
    await model.start()
    async with Client(model) as client:
        for _ in range(3):
            answer = await client.http.post(f"{CHAT}?a=%2F&b", content=b"text", headers={"Authorization": "Bearer key"})
    assert answer.json() == {"path": "/v1/chat/completions?a=%2F&b", "method": "POST"}
    assert (answer.status_code, answer.headers["X-Model"]) == (200, "chat")
    path, headers, body = model.requests[0]
    assert (path, headers["Authorization"], body) == ("/v1/chat/completions?a=%2F&b", "Bearer key", b"text")
    assert model.reads == 1


async def test_a_request_starts_an_idle_model_and_is_answered_when_it_runs(model: ModelInCluster) -> None:
    model.become_idle()
    async with Client(model) as client:
        answers = [asyncio.create_task(client.ask()) for _ in range(20)]
        await model.activated.wait()
        await client.until_held(20)
        assert model.resource is not None
        assert model.resource["status"]["activationTime"] >= STOPPED_AT
        await model.start()
        model.become_ready()
        assert [answer.status_code for answer in await asyncio.gather(*answers)] == [200] * 20
    assert len(model.requests) == 20
    assert client.activator.usage.body_bytes == client.activator.usage.requests == 0


async def test_a_model_that_is_about_to_be_stopped_gets_no_request_until_it_stays(
    model: ModelInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "LOOK_INTERVAL", 0.0)
    await model.start()
    async with Client(model) as client:
        assert (await client.ask()).status_code == 200
        model.become_idle()
        answer = asyncio.create_task(client.ask())
        await model.activated.wait()
        await client.until_held(1)
        assert len(model.requests) == 1
        model.become_ready()
        assert (await answer).status_code == 200


async def test_a_request_waits_until_the_service_reaches_the_pods(model: ModelInCluster) -> None:
    async with Client(model) as client:
        answer = asyncio.create_task(client.ask())
        await client.until_held(1)
        await model.start()
        assert (await answer).status_code == 200


async def test_comments_keep_an_event_stream_alive_until_the_model_runs(model: ModelInCluster) -> None:
    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    model.answer = events
    model.become_idle()
    body = json.dumps({"stream": True})
    async with Client(model, Limits(keep_alive=SHORT)) as client, client.http.stream("POST", CHAT, content=body) as got:
        assert got.headers["Content-Type"].startswith("text/event-stream")
        received = b""
        async for part in got.aiter_bytes():
            if WAITING * 2 in (received := received + part) and not model.requests:
                await model.start()
                model.become_ready()
        comments, _, rest = received.rpartition(WAITING)
        assert comments == WAITING * comments.count(WAITING)
        assert rest == b"data: one\n\ndata: [DONE]\n\n"


async def test_other_answers_keep_their_status_however_long_they_wait(model: ModelInCluster) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": "no"}, status=422)

    model.answer = refuse
    async with Client(model, Limits(keep_alive=SHORT)) as client:
        answer = asyncio.create_task(client.ask(stream=False))
        await client.until_held(1)
        await asyncio.sleep(4 * SHORT)
        await model.start()
        assert (await answer).status_code == 422


async def test_an_error_after_comments_is_an_event(model: ModelInCluster) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": "no"}, status=422)

    model.answer = refuse
    body = json.dumps({"stream": True})
    async with Client(model, Limits(keep_alive=SHORT)) as client, client.http.stream("POST", CHAT, content=body) as got:
        await model.start()
        last = [line async for line in got.aiter_lines() if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 422


async def test_requests_beyond_the_limit_are_refused_and_may_try_again(model: ModelInCluster) -> None:
    async with Client(model, Limits(requests=1)) as client:
        first = asyncio.create_task(client.ask())
        await client.until_held(1)
        refused = await client.ask()
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
        assert "the most that this activator holds" in refused.json()["error"]["message"]
        await model.start()
        assert (await first).status_code == 200


async def test_a_request_is_refused_when_the_model_does_not_start_in_time(model: ModelInCluster) -> None:
    model.become_idle()
    async with Client(model, Limits(wait=SHORT)) as client:
        refused = await client.ask()
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
    assert "was not ready within 0.05 s" in refused.json()["error"]["message"]


async def test_a_client_that_leaves_frees_its_place(model: ModelInCluster) -> None:
    async with Client(model, Limits(requests=1)) as client:
        first = asyncio.create_task(client.ask())
        await client.until_held(1)
        first.cancel()
        await client.until_held(0)
        reads = model.reads
        await asyncio.sleep(SHORT)
        assert model.reads == reads
    assert client.activator.usage.body_bytes == 0


@pytest.mark.parametrize("path", ["/models/other/v1/models", "/elsewhere/chat/v1", "/models/chat%2F..%2Fx/v1"])
async def test_only_existing_resources_of_the_namespaces_are_reached(model: ModelInCluster, path: str) -> None:
    async with Client(model, namespaces=("models",)) as client:
        refused = await client.http.get(path)
    assert refused.status_code == 404


async def test_a_model_that_its_user_stopped_is_not_started(model: ModelInCluster) -> None:
    assert model.resource is not None
    model.resource["spec"]["lifecycle"] = "Stopped"
    async with Client(model) as client:
        refused = await client.ask()
    assert refused.status_code == 503
    assert "set it to Running" in refused.json()["error"]["message"]
    assert not model.activated.is_set()


async def test_a_probe_starts_no_idle_model(model: ModelInCluster) -> None:
    model.become_idle()
    async with Client(model) as client:
        refused = await client.http.get("/models/chat/health")
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
        assert "a POST request starts it" in refused.json()["error"]["message"]
        assert not model.activated.is_set()
        answer = asyncio.create_task(client.ask())
        await model.activated.wait()
        await model.start()
        model.become_ready()
        assert (await answer).status_code == 200
        assert (await client.http.get("/models/chat/health")).status_code == 200


async def test_requests_survive_an_outage_of_the_api_server(model: ModelInCluster) -> None:
    async with Client(model) as client:
        first = asyncio.create_task(client.ask())
        await client.until_held(1)
        model.is_down = True
        await asyncio.sleep(SHORT)
        model.is_down = False
        await model.start()
        assert (await first).status_code == 200


async def test_without_an_api_server_an_unknown_model_is_refused_for_now(model: ModelInCluster) -> None:
    model.is_down = True
    async with Client(model) as client:
        assert (await client.ask()).status_code == 503


async def test_a_request_that_a_pod_dropped_while_it_ended_is_sent_again(model: ModelInCluster) -> None:
    async def drop_once(request: web.Request) -> web.Response:
        if len(model.requests) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(text="late")

    model.answer = drop_once
    await model.start()
    async with Client(model) as client:
        assert (await client.ask()).text == "late"


async def test_a_request_that_always_breaks_its_connection_fails(model: ModelInCluster) -> None:
    async def drop(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    model.answer = drop
    await model.start()
    async with Client(model) as client:
        assert (await client.ask()).status_code == 502
    assert len(model.requests) == proxy.MAX_BROKEN


async def test_a_pod_that_drains_is_not_the_answer_but_an_overloaded_one_is(model: ModelInCluster) -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.json_response({"error": "busy"}, status=503, headers={"Retry-After": "3"})

    model.answer = busy
    await model.start()
    async with Client(model) as client:
        overloaded = await client.ask()
        assert (overloaded.status_code, overloaded.headers["Retry-After"]) == (503, "3")
        model.become_idle()
        answer = asyncio.create_task(client.ask())
        await model.activated.wait()
        model.answer = model.echo
        model.become_ready()
        assert (await answer).status_code == 200


async def test_an_answer_that_breaks_does_not_look_complete(model: ModelInCluster) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    model.answer = half
    await model.start()
    async with Client(model) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.ask()
