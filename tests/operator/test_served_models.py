"""Which resource serves a model of an endpoint for many models."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from planning_support.resources import resource_object

from megatron_operator.activator.models import Availability
from megatron_operator.activator.served_models import model_missing, model_not_found, served_models

NOON, LATER = "2026-11-24T12:00:00Z", "2026-11-24T12:00:01Z"


def resource(name: str, served_name: str | None = None, created: str = NOON, **metadata: Any) -> dict[str, Any]:
    obj = resource_object(name)
    obj["metadata"] |= {"creationTimestamp": created, **metadata}
    obj["spec"]["model"] |= {"servedName": served_name} if served_name else {}
    return obj


def test_models_have_the_served_name_or_that_of_their_resource() -> None:
    found = served_models([resource("zebra"), resource("chat", "org/Chat-7B")])
    assert [(name, str(model.key)) for name, model in found.items()] == [
        ("org/Chat-7B", "models/chat"),
        ("zebra", "models/zebra"),
    ]
    assert found["zebra"].availability is Availability.WAITING


def test_the_oldest_resource_serves_a_name_in_any_order_of_the_list() -> None:
    same = [resource("c", "chat"), resource("b", "chat"), resource("a", "chat", LATER), resource("chat", None, LATER)]
    for order in itertools.permutations(same):
        found = served_models(order)
        assert list(found) == ["chat"]
        assert found["chat"].key.name == "b"
        assert found["chat"].duplicates == ("c", "a", "chat")


def test_a_resource_that_is_being_deleted_leaves_its_name_to_the_next() -> None:
    found = served_models([resource("a", "chat", deletionTimestamp=LATER), resource("b", "chat", LATER)])
    assert (found["chat"].key.name, found["chat"].duplicates) == ("b", ())


def test_the_description_is_that_of_openai_with_the_resource() -> None:
    (model,) = served_models([resource("a", "chat"), resource("b", "chat", LATER)]).values()
    assert model.description == {
        "id": "chat",
        "object": "model",
        "created": 1795521600,
        "owned_by": "megatron",
        "resource": "models/a",
        "availability": "Waiting",
        "duplicates": ["b"],
    }


def test_adapters_are_described_as_by_the_model_server() -> None:
    chat = resource("a", "chat")
    chat["spec"]["adapters"] = [{"name": "org/sql", "path": "/adapters/sql"}]
    found = served_models([chat])
    assert list(found) == ["chat", "org/sql"]
    assert found["org/sql"].description == {
        **found["chat"].description,
        "id": "org/sql",
        "root": "/adapters/sql",
        "parent": "chat",
    }


def test_the_oldest_resource_serves_a_name_whether_of_its_model_or_of_an_adapter() -> None:
    adapter = {"adapters": [{"name": "sql", "path": "/adapters/sql"}]}
    old, middle, new = resource("old", "chat"), resource("middle", "sql", LATER), resource("new", created=LATER)
    new["spec"] |= adapter
    for order in itertools.permutations([old, middle, new]):
        found = served_models(order)
        assert (found["sql"].key.name, found["sql"].adapter, found["sql"].duplicates) == ("middle", None, ("new",))
        assert found["new"].duplicates == ()
    old["spec"] |= adapter
    found = served_models([new, middle, old])
    assert (found["sql"].key.name, found["sql"].duplicates) == ("old", ("middle", "new"))
    assert found["sql"].description["parent"] == "chat"


def test_an_adapter_with_the_name_of_its_model_does_not_hide_the_model() -> None:
    chat = resource("a", "chat")
    chat["spec"]["adapters"] = [{"name": "chat", "path": "/adapters/sql"}]
    (model,) = served_models([chat]).values()
    assert (model.adapter, model.duplicates) == (None, ())


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ([], "'x' is not served here; this endpoint has no models"),
        (["b", "a"], "'x' is not served here; the models are 'a', 'b'"),
        ([f"m{number:03}" for number in range(52)], "'m049' and 2 more, see /v1/models"),
    ],
)
def test_an_unknown_model_is_refused_with_the_known_names(known: list[str], words: str) -> None:
    refusal = model_not_found("x", known)
    assert words in str(refusal)
    assert refusal.status == 404
    error = refusal.body["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "model_not_found", "model")
    assert model_missing(known).status == 400
