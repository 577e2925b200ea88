"""API keys at an activator: a model is started only for a request with one of its keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from planning_support.activating import CHAT, STOPPED_AT, Client, ModelInCluster, shorten_times

from megatron_operator.activator import models

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
            assert (await client.ask()).status_code == 401
    assert model.reads == 2  # the resource and the Secret


async def test_the_server_of_a_model_that_runs_checks_the_keys(model: ModelInCluster) -> None:
    model.become_ready()
    await model.start()
    async with Client(model) as client:
        assert (await client.http.post(CHAT, headers={"X-Api-Key": "wrong"})).status_code == 200
    assert model.requests[0][1]["X-Api-Key"] == "wrong"


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
