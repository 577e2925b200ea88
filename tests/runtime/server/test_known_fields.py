"""Limits on the text of fields are checked before large bodies take memory as Python objects."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from megatron_runtime.server.bodies.limits import MAX_METADATA_CHARACTERS, MAX_SCHEMA_CHARACTERS
from megatron_runtime.server.bodies.messages_protocol import CountTokensBody, MessagesBody
from megatron_runtime.server.bodies.protocol import ChatCompletionBody, CompletionBody
from megatron_runtime.server.bodies.responses_protocol import ResponsesBody
from megatron_runtime.server.body_route import _content
from megatron_runtime.server.errors import ApiError, _from_validation
from megatron_runtime.server.known_fields import KnownFields

Body = type[BaseModel]
TURN = [{"role": "user", "content": "x"}]
MOST = 2
"""Memory of a refused body, as a multiple of its size."""
NEEDED: dict[Any, dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatCompletionBody: {"messages": TURN},
    ResponsesBody: {"input": "x"},
    MessagesBody: {"messages": TURN, "max_tokens": 1},
    CountTokensBody: {"messages": TURN},
}


def wide(number: int) -> dict[str, Any]:
    fields = {f"field_{index}_of_many": {"type": "string", "maxLength": 50} for index in range(number)}
    return {"type": "object", "properties": fields}


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def function(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


PLACES: dict[tuple[Body, str], Callable[[Any], dict[str, Any]]] = {
    (CompletionBody, "guided_json"): lambda schema: {"guided_json": schema},
    (CompletionBody, "structured_outputs.json"): lambda schema: {"structured_outputs": {"json": schema}},
    (CompletionBody, "response_format.json_schema.schema"): response_format,
    (ChatCompletionBody, "response_format.json_schema.schema"): response_format,
    (ChatCompletionBody, "tools.0.function.parameters"): function,
    (ResponsesBody, "tools.0.parameters"): lambda schema: {
        "tools": [{"type": "function", "name": "f", "parameters": schema}]
    },
    (ResponsesBody, "text.format.schema"): lambda schema: {
        "text": {"format": {"type": "json_schema", "schema": schema}}
    },
    (MessagesBody, "tools.0.input_schema"): lambda schema: {"tools": [{"name": "f", "input_schema": schema}]},
    (MessagesBody, "output_config.format.schema"): lambda schema: {
        "output_config": {"format": {"type": "json_schema", "schema": schema}}
    },
    (MessagesBody, "output_format.schema"): lambda schema: {"output_format": {"type": "json_schema", "schema": schema}},
    (CountTokensBody, "tools.0.input_schema"): lambda schema: {"tools": [{"name": "f", "input_schema": schema}]},
}
"""All fields with a schema, by their name in errors."""
HOSTILE = {
    "properties": wide(20_000),
    "enum": {"enum": [f"{number:x}" for number in range(170_000)]},
    "required": {"type": "object", "required": [f"{number:x}" for number in range(170_000)]},
    "$defs": {"$defs": {f"d{number}": {"type": "string", "maxLength": 50} for number in range(26_000)}},
    "nested": {"anyOf": [json.loads('{"additionalProperties":' * 50 + "{}" + "}" * 50)] * 1_000},
    "text": {"const": "x" * 2**20 + "\U0001f600"},
    "pattern": {"pattern": "a|b" * 400_000},
}


def body_of(model: Body, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", **NEEDED[model], **fields}


def refusal(model: Body, raw: bytes) -> tuple[ApiError, int]:
    """The error about a body, and the most memory that was allocated meanwhile."""
    fields = KnownFields(model)
    tracemalloc.start()
    try:
        with pytest.raises((RequestValidationError, ApiError)) as refused:
            _content(raw, fields)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = refused.value
    return error if isinstance(error, ApiError) else _from_validation(error.errors()), peak


@pytest.mark.parametrize(("model", "param"), PLACES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_a_schema_beyond_its_limit_is_refused_before_it_takes_memory(model: Body, param: str, schema: Any) -> None:
    """As Python objects, those of 20,000 properties and of 170,000 texts took 7 times their size."""
    content = body_of(model, PLACES[model, param](schema))
    raw = json.dumps(content, ensure_ascii=False).encode()
    assert len(raw) > 2**20
    error, peak = refusal(model, raw)
    assert peak < MOST * len(raw)
    with pytest.raises(ValidationError) as expected:
        model.model_validate(content)
    same = _from_validation(expected.value.errors(include_url=False))
    assert error.param == same.param == param
    assert f"give at most {MAX_SCHEMA_CHARACTERS} (got " in str(error)
    assert str(error).split(" (got ")[0] == str(same).split(" (got ")[0]


def test_metadata_beyond_its_limit_is_refused_before_it_takes_memory() -> None:
    raw = json.dumps(body_of(CompletionBody, {"metadata": HOSTILE["enum"]})).encode()
    error, peak = refusal(CompletionBody, raw)
    assert (error.param, peak < MOST * len(raw)) == ("metadata", True)
    assert f"give at most {MAX_METADATA_CHARACTERS} " in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": [wide(20_000)]}, "response_format"),
        ({"response_format": {"json_schema": [wide(20_000)]}}, "response_format.json_schema"),
        ({"tools": wide(20_000)}, "tools"),
        ({"tools": [{}, {"function": [wide(20_000)]}]}, "tools.1.function"),
    ],
)
def test_a_schema_in_a_field_of_another_type_is_refused_before_it_takes_memory(
    fields: dict[str, Any], param: str
) -> None:
    raw = json.dumps(body_of(ChatCompletionBody, fields)).encode()
    error, peak = refusal(ChatCompletionBody, raw)
    assert (error.status, error.param, peak < MOST * len(raw)) == (400, param, True)


@pytest.mark.parametrize(
    "hidden",
    [
        {"unknown": wide(20_000)},
        {"response_format": {"type": "text", "unknown": wide(20_000)}},
        {"tools": [{"type": "function", "unknown": wide(20_000), "function": {"name": "f"}}]},
    ],
)
def test_unknown_fields_take_no_memory(hidden: dict[str, Any]) -> None:
    raw = json.dumps(body_of(ChatCompletionBody, hidden)).encode()
    fields = KnownFields(ChatCompletionBody)
    tracemalloc.start()
    try:
        content = _content(raw, fields)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.1 * len(raw)
    assert ChatCompletionBody.model_validate(content) == ChatCompletionBody.model_validate(json.loads(raw))


def test_the_last_of_several_fields_with_a_name_counts() -> None:
    rest = json.dumps(body_of(CompletionBody, {"guided_json": {}})).encode()
    raw = b'{"guided_json":' + json.dumps(wide(20_000)).encode() + b"," + rest[1:]
    assert _content(raw, KnownFields(CompletionBody)) == body_of(CompletionBody, {"guided_json": {}})


SCHEMA = {"description": '\u4e2d\u6587/"\\' * 15_000, "properties": wide(1_000)["properties"]}
"""Within the limit, but not as it is written below."""


@pytest.mark.parametrize(("model", "param"), PLACES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize(
    "written",
    [
        lambda content: json.dumps(content),
        lambda content: json.dumps(content, indent=8, ensure_ascii=False),
        lambda content: json.dumps(content).replace("/", "\\/"),
    ],
    ids=["escaped", "indented", "with escaped slashes"],
)
def test_a_schema_within_its_limit_is_accepted_however_it_is_written(
    model: Body, param: str, written: Callable[[Any], str]
) -> None:
    content = body_of(model, PLACES[model, param](SCHEMA))
    raw = written(content).encode()
    assert len(raw) > MAX_SCHEMA_CHARACTERS
    found = _content(raw, KnownFields(model))
    assert found == content
    model.model_validate(found)


def test_a_schema_as_a_text_within_its_limit_is_accepted() -> None:
    text = json.dumps(wide(4_500), separators=(",", ":"))
    raw = json.dumps(body_of(CompletionBody, {"guided_json": text, "user": None})).encode()
    assert len(text) < MAX_SCHEMA_CHARACTERS < len(json.dumps(text))
    assert _content(raw, KnownFields(CompletionBody)) == json.loads(raw)
