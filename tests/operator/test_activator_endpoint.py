"""One endpoint for many models, with real connections."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from planning_support.fleet import EndpointClient, Fleet

from megatron_operator.activator import catalog, models
from megatron_operator.activator.limits import Limits
from megatron_operator.activator.service import Served

CHAT = "/v1/chat/completions"
IDLE = {"idleAfter": "1h", "stopAfter": "1h"}
SQL = [{"name": "org/sql", "path": "/adapters/sql"}]


async def test_requests_go_to_the_model_that_their_body_names(fleet: Fleet) -> None:
    await fleet.add("small")
    await fleet.add("large", "org/Large-70B")
    body = b'{"messages": [{"model": "small"}], "model":"org/Large-70B", "x": 1e999}'
    async with EndpointClient(fleet) as client:
        large = await client.post(f"{CHAT}?a=%2F", content=body)
        small = await client.post("/models/v1/embeddings", json={"model": "small"})
    assert (large.json()["answered_by"], small.json()["answered_by"]) == ("large", "small")
    assert fleet.requests[0] == ("large", f"{CHAT}?a=%2F", body)
    assert fleet.requests[1][1] == "/v1/embeddings"
    assert len(fleet.selectors) == 1


async def test_all_models_are_listed_and_none_is_started(fleet: Fleet) -> None:
    await fleet.add("small")
    await fleet.add("large", "org/Large-70B", idle=True)
    await fleet.add("off", idle=True, lifecycle="Stopped")
    async with EndpointClient(fleet) as client:
        listed = (await client.get("/v1/models")).json()
        large = (await client.get("/models/v1/models/org/Large-70B")).json()
        unknown = await client.get("/v1/models/other")
    assert listed["object"] == "list"
    assert [(each["id"], each["object"], each["availability"]) for each in listed["data"]] == [
        ("off", "model", "Stopped"),
        ("org/Large-70B", "model", "Idle"),
        ("small", "model", "Available"),
    ]
    assert large == listed["data"][1]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert not fleet.activated.is_set()
    assert fleet.requests == []


@pytest.mark.parametrize(
    ("content", "status", "code", "words"),
    [
        (b'{"model": "other"}', 404, "model_not_found", "model: 'other' is not served here; the models are 'small'"),
        (b"{}", 400, "model_missing", "model: is missing, or not a text; the models are 'small'"),
        (b'{"model": ["small"]}', 400, "model_missing", "model: is missing, or not a text"),
        (b'["small"]', 400, "invalid_json", "not a JSON object"),
        (b'{"model": "small", "x": NaN}', 400, "invalid_json", "not a JSON object by RFC 8259, which has no NaN"),
        (b'{"model": "small"', 400, "invalid_json", "not a JSON object"),
        (b"", 400, "invalid_json", "not a JSON object"),
        (b"[" * 100_000, 400, "invalid_json", "not a JSON object"),
    ],
)
async def test_a_body_that_names_no_model_is_refused(
    fleet: Fleet, content: bytes, status: int, code: str, words: str
) -> None:
    await fleet.add("small")
    async with EndpointClient(fleet) as client:
        refused = await client.post(CHAT, content=content)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert words in error["message"]
    assert fleet.requests == []


async def test_bodies_beyond_the_limit_are_refused_before_they_are_parsed(fleet: Fleet) -> None:
    await fleet.add("small")
    async with EndpointClient(fleet, limits=Limits(body_bytes=100)) as client:
        refused = await client.post(CHAT, json={"model": "small", "prompt": "x" * 100})
    assert refused.status_code == 413


@pytest.mark.parametrize(
    ("served", "path", "status"),
    [
        (Served(), "/v1/models", 404),
        (Served(endpoint_namespace="models"), "/v1/models", 200),
        (Served(("models", "other")), "/v1/models", 404),
        (Served(("models", "other")), "/models/v1/models", 200),
        (Served(("models",)), "/other/v1/models", 404),
        (Served(), "/other/v1/models", 200),
        (Served(), "/no_name/v1/models", 404),
        (Served(("models",)), "/v1/responses/one", 404),
    ],
)
async def test_an_endpoint_has_one_namespace(fleet: Fleet, served: Served, path: str, status: int) -> None:
    async with EndpointClient(fleet, served) as client:
        assert (await client.get(path)).status_code == status


async def test_the_selector_restricts_the_models_of_the_endpoint(fleet: Fleet) -> None:
    async with EndpointClient(fleet, Served(("models",), selector="team in (a, b)")) as client:
        await client.get("/v1/models")
    assert fleet.selectors == ["team in (a, b)"]


async def test_the_oldest_of_two_resources_serves_their_name_and_the_log_says_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalog, "LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(models, "LOOK_INTERVAL", 0.0)
    await fleet.add("old", "chat")
    await fleet.add("new", "chat")
    with caplog.at_level(logging.WARNING, "megatron_operator.activator"):
        async with EndpointClient(fleet) as client:
            answers = [await client.post(CHAT, json={"model": "chat"}) for _ in range(3)]
            (listed,) = (await client.get("/v1/models")).json()["data"]
            del fleet.resources["old"]
            answers.append(await client.post(CHAT, json={"model": "chat"}))
    assert [each.json()["answered_by"] for each in answers] == ["old"] * 3 + ["new"]
    assert (listed["resource"], listed["duplicates"]) == ("models/old", ["new"])
    assert len([each for each in caplog.messages if "set another spec.model.servedName" in each]) == 1


async def test_the_next_resource_takes_over_at_once_when_the_oldest_is_deleted(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "LOOK_INTERVAL", 0.0)
    await fleet.add("old", "chat")
    await fleet.add("new", "chat")
    async with EndpointClient(fleet) as client:
        assert (await client.post(CHAT, json={"model": "chat"})).json()["answered_by"] == "old"
        del fleet.resources["old"]
        assert (await client.post(CHAT, json={"model": "chat"})).json()["answered_by"] == "new"
        del fleet.resources["new"]
        gone = await client.post(CHAT, json={"model": "chat"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_new_model_is_found_without_a_restart(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "POLL", 0.0)
    await fleet.add("small")
    async with EndpointClient(fleet) as client:
        assert (await client.post(CHAT, json={"model": "large"})).status_code == 404
        await fleet.add("large")
        assert (await client.post(CHAT, json={"model": "large"})).json()["answered_by"] == "large"


async def test_unknown_names_cost_the_api_server_few_requests(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "POLL", 60.0)
    await fleet.add("small")
    async with EndpointClient(fleet) as client:
        for number in range(20):
            assert (await client.post(CHAT, json={"model": f"{number}"})).status_code == 404
        for _ in range(20):
            assert (await client.get("/models/v1/models/other")).status_code == 404
    assert len(fleet.selectors) == 1


async def test_namespaces_without_models_cost_little_memory_and_few_requests(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MOST_NAMESPACES", 2)
    known = catalog.Catalog(fleet)
    for namespace in ("a", "a", "b", "c", "c", "a"):
        assert await known.models(namespace) == {}
    assert len(fleet.selectors) == 4  # of a, b, c, and of a again


async def test_a_request_starts_its_model_only(fleet: Fleet) -> None:
    await fleet.add("small", idle=True)
    await fleet.add("large", idle=True)
    async with EndpointClient(fleet) as client:
        answer = asyncio.create_task(client.post(CHAT, json={"model": "large"}))
        await fleet.activated.wait()
        assert "activationTime" not in fleet.resources["small"]["status"]
        await fleet.start("large")
        assert (await answer).json()["answered_by"] == "large"


async def test_requests_for_an_adapter_go_to_the_resource_that_has_it(fleet: Fleet) -> None:
    await fleet.add("small")
    await fleet.add("large", adapters=SQL)
    body = b'{"model": "org/sql"}'
    async with EndpointClient(fleet) as client:
        answer = await client.post(CHAT, content=body)
        listed = (await client.get("/v1/models")).json()["data"]
        described = (await client.get("/v1/models/org/sql")).json()
        unknown = await client.post(CHAT, json={"model": "sql"})
    assert answer.json()["answered_by"] == "large"
    assert fleet.requests == [("large", CHAT, body)]
    assert [each["id"] for each in listed] == ["large", "org/sql", "small"]
    assert described == listed[1]
    assert (described["parent"], described["root"], described["resource"]) == (
        "large",
        "/adapters/sql",
        "models/large",
    )
    assert "the models are 'large', 'org/sql', 'small'" in unknown.json()["error"]["message"]


async def test_a_request_for_an_adapter_starts_its_model(fleet: Fleet) -> None:
    await fleet.add("small", idle=True)
    await fleet.add("large", idle=True, adapters=SQL)
    async with EndpointClient(fleet) as client:
        assert (await client.get("/v1/models/org/sql")).json()["availability"] == "Idle"
        answer = asyncio.create_task(client.post(CHAT, json={"model": "org/sql"}))
        await fleet.activated.wait()
        assert "activationTime" not in fleet.resources["small"]["status"]
        await fleet.start("large")
        assert (await answer).json()["answered_by"] == "large"


async def test_an_adapter_of_a_model_that_its_user_stopped_is_refused(fleet: Fleet) -> None:
    await fleet.add("large", lifecycle="Stopped", adapters=SQL)
    async with EndpointClient(fleet) as client:
        refused = await client.post(CHAT, json={"model": "org/sql"})
    assert refused.status_code == 503
    assert "models/large is stopped (spec.lifecycle)" in refused.json()["error"]["message"]
    assert not fleet.activated.is_set()


async def test_the_next_resource_serves_the_name_of_an_adapter_that_was_removed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalog, "LOOK_INTERVAL", 0.0)
    await fleet.add("old", adapters=SQL)
    await fleet.add("new", "org/sql")
    with caplog.at_level(logging.WARNING, "megatron_operator.activator"):
        async with EndpointClient(fleet) as client:
            before = await client.post(CHAT, json={"model": "org/sql"})
            fleet.resources["old"]["spec"]["adapters"] = []
            after = await client.post(CHAT, json={"model": "org/sql"})
    assert (before.json()["answered_by"], after.json()["answered_by"]) == ("old", "new")
    assert "models/old: serves 'org/sql', and new with the same name get no requests" in caplog.text


async def test_events_pass_at_once_and_the_end_of_the_client_is_passed_on(fleet: Fleet) -> None:
    await fleet.add("small")
    body = json.dumps({"model": "small", "stream": True})
    async with EndpointClient(fleet) as client:
        async with client.stream("POST", CHAT, content=body) as got:
            assert await anext(got.aiter_bytes()) == b"data: one\n\n"
            assert not fleet.left.is_set()
        await fleet.left.wait()


async def test_models_that_are_never_stopped_serve_through_an_outage_of_the_api_server(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "LOOK_INTERVAL", 0.0)
    monkeypatch.setattr(models, "LOOK_INTERVAL", 0.0)
    await fleet.add("always")
    await fleet.add("sometimes", autoSuspend=IDLE)
    async with EndpointClient(fleet) as client:
        for name in fleet.resources:
            assert (await client.post(CHAT, json={"model": name})).status_code == 200
        fleet.is_down = True
        answers = [await client.post(CHAT, json={"model": name}) for name in fleet.resources]
        assert len((await client.get("/v1/models")).json()["data"]) == 2
    assert [each.status_code for each in answers] == [200, 503]
