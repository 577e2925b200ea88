"""API keys at an activator: a model is started only for a request with one of its keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from planning_support.activating import CHAT, STOPPED_AT, Client, ModelInCluster, shorten_times
from planning_support.fleet import EndpointClient, Fleet

from megatron_operator.activator import catalog, models
from megatron_operator.activator.api_keys import UNKNOWN_KEY_BYTES

LARGE = UNKNOWN_KEY_BYTES
KEYS = "# of the team\n\nfirst\n second \n"


@pytest.fixture
async def model(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelInCluster]:
    shorten_times(monkeypatch)
    model = ModelInCluster()
    assert model.resource is not None
    model.resource["spec"]["frontend"] = {"apiKeysSecret": {"name": "users"}}
    model.secrets = {"users": {"api-keys": KEYS}}
    model.become_idle()
    yield model
    await model.stop()


def become_running(model: ModelInCluster) -> None:
    """Known to the endpoint of its namespace, too."""
    assert model.resource is not None
    model.resource["metadata"]["creationTimestamp"] = STOPPED_AT
    model.become_ready()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic first"},
        {"Authorization": "Bearer # of the team"},
        {"X-Api-Key": ""},
        {"X-Api-Key": b"\xff"},
    ],
)
async def test_a_request_without_a_key_starts_nothing_and_does_not_wait(
    model: ModelInCluster, headers: dict[str, str]
) -> None:
    async with Client(model) as client:
        refused = await client.http.post(CHAT, json={"stream": True}, headers=headers)
        assert client.metric("megatron_activator_wait_seconds_count") == 0
    assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert not model.activated.is_set()


async def test_a_request_for_an_adapter_needs_a_key_of_its_model(model: ModelInCluster) -> None:
    assert model.resource is not None
    model.resource["metadata"]["creationTimestamp"] = STOPPED_AT
    model.resource["spec"]["adapters"] = [{"name": "sql", "path": "/adapters/sql"}]
    path, body = "/models/v1/chat/completions", {"model": "sql"}
    async with Client(model) as client:
        assert (await client.http.post(path, json=body)).status_code == 401
        assert not model.activated.is_set()
        answer = asyncio.create_task(client.http.post(path, json=body, headers={"X-Api-Key": "first"}))
        await model.activated.wait()
        await model.start()
        model.become_ready()
        assert (await answer).status_code == 200


@pytest.mark.parametrize("headers", [{"Authorization": "bearer first"}, {"X-Api-Key": "second"}])
async def test_a_request_with_a_key_starts_the_model(model: ModelInCluster, headers: dict[str, str]) -> None:
    async with Client(model) as client:
        answer = asyncio.create_task(client.http.post(CHAT, json={}, headers=headers))
        await model.activated.wait()
        await model.start()
        model.become_ready()
        assert (await answer).status_code == 200


async def test_many_requests_read_resource_and_keys_once(
    model: ModelInCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "POLL", 60.0)
    async with Client(model) as client:
        for _ in range(5):
            assert (await client.http.post(CHAT, json={}, headers={"X-Api-Key": "wrong"})).status_code == 401
    assert model.reads == 2  # the resource and the Secret


async def answer_to_a_head(client: Client, path: str, header: str) -> str:
    """The answer to a request that sends no byte of its body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.http.base_url.port)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n{header}Content-Length: {LARGE * 2}\r\n\r\n".encode())
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("path", [CHAT, "/models/v1/chat/completions"])
@pytest.mark.parametrize("header", ["", "X-Api-Key: wrong\r\n", "Authorization: Bearer wrong\r\n"])
async def test_no_large_body_without_a_key_is_read_for_a_model_that_runs(
    model: ModelInCluster, path: str, header: str
) -> None:
    become_running(model)
    async with Client(model) as client, asyncio.timeout(30):
        refused = await answer_to_a_head(client, path, header)
        assert client.activator.usage.body_bytes == 0
    assert refused.startswith("HTTP/1.1 401 ")
    assert "invalid_api_key" in refused


async def test_a_body_of_unknown_length_without_a_key_is_read_up_to_the_limit(model: ModelInCluster) -> None:
    become_running(model)
    chunk = b"%x\r\n" % (LARGE + 1) + b" " * (LARGE + 1) + b"\r\n"
    async with Client(model) as client, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.http.base_url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Api-Key: wrong\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + chunk)
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        await writer.wait_closed()


async def test_a_request_without_a_key_for_a_model_that_runs_costs_no_read_of_the_secret(model: ModelInCluster) -> None:
    become_running(model)
    async with Client(model) as client:
        assert (await client.ask()).status_code == 401
    assert model.reads == 1


async def test_the_server_of_a_model_that_runs_checks_a_key_that_the_secret_does_not_have(
    model: ModelInCluster,
) -> None:
    """The control token is such a key, and its requests are short."""
    become_running(model)
    await model.start()
    async with Client(model) as client:
        for content in (b"", b"x" * 1000):
            assert (await client.http.post(CHAT, content=content, headers={"X-Api-Key": "wrong"})).status_code == 200
        assert (await client.http.get("/models/chat/health")).status_code == 200
    assert model.requests[0][1]["X-Api-Key"] == "wrong"


@pytest.mark.parametrize("path", [CHAT, "/models/v1/chat/completions"])
@pytest.mark.parametrize("reason", ["valid", "not allowed", "absent", "other keys", "no API server"])
async def test_a_large_body_is_passed_on_with_a_key_that_may_be_valid(
    model: ModelInCluster, path: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_running(model)
    await model.start()
    assert model.resource is not None
    async with Client(model) as client:
        await client.http.get("/models/chat/health")
        await client.http.get("/models/v1/models")
        if reason == "other keys":
            model.resource["spec"]["engine"] = {"extraArgs": ["--api-key=third"]}
            monkeypatch.setattr(catalog, "LOOK_INTERVAL", 0.0)
        elif reason == "no API server":
            model.is_down = True
        elif reason != "valid":
            model.secrets = None if reason == "not allowed" else {}
        key = "first" if reason == "valid" else "third"
        body = {"model": "chat", "prompt": "x" * LARGE}
        answers = [await client.http.post(path, json=body, headers={"X-Api-Key": key}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3


async def test_the_key_of_any_model_of_an_endpoint_suffices_to_read_a_body(fleet: Fleet) -> None:
    for name in ("one", "two"):
        await fleet.add(name, frontend={"apiKeysSecret": {"name": name}})
    fleet.secrets = {"one": {"api-keys": "first"}, "two": {"api-keys": "second"}}
    path, body = "/models/v1/completions", {"model": "one", "prompt": "x" * LARGE}
    async with EndpointClient(fleet) as client:
        sent = [await client.post(path, json=body, headers={"X-Api-Key": key}) for key in ("first", "second", "third")]
        assert [answer.status_code for answer in sent] == [200, 200, 401]
        assert (await client.post(path, json={"model": "one"})).status_code == 401
    assert len(fleet.requests) == 2  # the server of the model checks them


async def test_an_open_model_of_an_endpoint_needs_no_key(fleet: Fleet) -> None:
    await fleet.add("closed", frontend={"apiKeysSecret": {"name": "users"}})
    await fleet.add("open")
    async with EndpointClient(fleet) as client:
        answer = await client.post("/models/v1/completions", json={"model": "open", "prompt": "x" * LARGE})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("secrets", "fix"),
    [
        (None, "may not read the API keys in the Secret users; add it to activator.apiKeySecrets"),
        ({}, "there is no Secret users with the key api-keys"),
        ({"users": {"other": "first"}}, "there is no Secret users with the key api-keys"),
    ],
)
async def test_a_model_whose_keys_cannot_be_read_is_not_started(
    model: ModelInCluster, secrets: dict[str, dict[str, str]] | None, fix: str
) -> None:
    model.secrets = secrets
    async with Client(model) as client:
        refused = await client.http.post(CHAT, headers={"X-Api-Key": "first"})
    assert refused.status_code == 503
    assert fix in refused.json()["error"]["message"]
    assert not model.activated.is_set()
