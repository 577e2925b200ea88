"""Anthropic's Messages API: conversion of requests, and the blocks and stream events of answers."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from runtime_support.byte_backend import END, byte_backend
from starlette.types import Receive, Scope, Send

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.anthropic.error_bodies import error_body
from megatron_runtime.server.anthropic.message_routes import ERROR_RESPONSES
from megatron_runtime.server.anthropic.messages import MessageEvents, message
from megatron_runtime.server.bodies.messages_protocol import CountTokensBody, MessagesBody
from megatron_runtime.server.errors import ApiError, formatted_error
from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.messages.message_format import ResponseParsing
from megatron_runtime.server.messages.tool_parsers.formats import HERMES
from megatron_runtime.server.metrics import FrontendMetrics
from megatron_runtime.server.openai.answer import Answer
from megatron_runtime.server.request_log import RequestLog

TOKENIZER = Tokenizer(byte_backend(), location="bytes", eod=END)
QUESTION = {"role": "user", "content": "Hello"}
SORRY = "internal error; the log of the server has the cause"
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object", "properties": {}}}


def body(**fields: Any) -> MessagesBody:
    return MessagesBody.model_validate({"model": "m", "max_tokens": 50, "messages": [QUESTION], **fields})


def conversation(*turns: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [each.for_template() for each in body(messages=list(turns), **fields).chat_messages]


# Requests


def test_blocks_become_messages_of_a_chat() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "Rain?", "signature": "s"}
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]}
    failed = {"type": "tool_result", "tool_use_id": "c2", "content": "no such city", "is_error": True}
    found = conversation(
        {"role": "user", "content": [{"type": "text", "text": "Weather?", **cached}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I ask."}, call]},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "Well?"}]},
        system=[{"type": "text", "text": "Be kind.", **cached}, {"type": "text", "text": "Be short."}],
    )
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert found == [
        {"role": "system", "content": "Be kind.\nBe short."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning_content": "Rain?",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no such city"},
        {"role": "user", "content": "Well?"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", None, False)),
        ({"type": "tool", "name": "weather"}, ("required", "weather", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_tool_choice_has_its_meaning_in_chats(choice: Any, expected: tuple[str, str | None, bool]) -> None:
    use = body(tools=[WEATHER], tool_choice=choice).tool_use
    assert (use.choice, use.named, use.is_parallel) == expected


def test_only_an_answer_that_the_client_begins_is_continued() -> None:
    begun = {"role": "assistant", "content": "It is"}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}]}
    assert body(messages=[QUESTION, begun]).continues_answer
    assert not body(messages=[QUESTION]).continues_answer
    assert not body(messages=[QUESTION, called]).continues_answer


def test_thinking_and_effort_reach_the_chat_template() -> None:
    chosen = body(thinking={"type": "enabled", "budget_tokens": 1024}, output_config={"effort": "low"})
    assert chosen.template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert body(thinking={"type": "disabled"}).template_kwargs == {"enable_thinking": False}
    assert body().template_kwargs == {}


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_is_the_format_of_the_answer(field: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    asked = body(**{field: {"format": form} if field == "output_config" else form})
    assert asked.format == ("output_config.format", {"type": "object"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "images and documents are not",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "type 'web_search_20250305' is not"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "name must be set"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "names 'x'"),
        ({"mcp_servers": [{"url": "x"}]}, "is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        body(**fields)


def test_tokens_are_counted_without_a_limit() -> None:
    counted = CountTokensBody.model_validate({"model": "m", "messages": [QUESTION], "system": "Be short."})
    assert [each.role for each in counted.chat_messages] == ["system", "user"]


# Answers

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
TEXT = f"<think>\nIs it warm?\n</think>\n\nI ask.{CALL}"


def answer(asked: MessagesBody) -> Answer:
    parsing = ResponseParsing(asked.tool_use, HERMES, starts_with_reasoning=False, has_parser=True)
    return Answer(asked, [[1, 2, 3]], "msg_", parsing)


def last(text: str, **fields: Any) -> Delta:
    return Delta(0, text, **{"finish_reason": "stop", "generated_tokens": 30, "cached_tokens": 2, **fields})


def streamed(asked: MessagesBody, *pieces: str) -> list[dict[str, Any]]:
    events = MessageEvents(answer(asked), TOKENIZER)
    sent = list(events.opening())
    for piece in pieces:
        sent += events.delta(Delta(0, piece))
    return [dict(event) for event in (*sent, *events.delta(last("")), *events.ending())]


def test_an_answer_has_blocks_of_thinking_text_and_calls() -> None:
    asked = body(tools=[WEATHER])
    made = message(answer(asked), [last(TEXT)], TOKENIZER)
    thinking, text, call = made["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "Is it warm?", "I ask.")
    assert thinking["signature"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Köln"})
    assert made["stop_reason"] == "tool_use"
    assert (made["usage"]["input_tokens"], made["usage"]["cache_read_input_tokens"]) == (1, 2)
    assert made["usage"]["output_tokens_details"] == {"thinking_tokens": len("Is it warm?")}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_opens_and_closes_each_block_in_order(size: int) -> None:
    asked = body(tools=[WEATHER])
    events = streamed(asked, *(TEXT[at : at + size] for at in range(0, len(TEXT), size)))
    order = [(event["type"], event.get("index")) for event in events if event["type"] != "content_block_delta"]
    blocks = [(f"content_block_{end}", index) for index in range(3) for end in ("start", "stop")]
    assert order == [("message_start", None), *blocks, ("message_delta", None), ("message_stop", None)]
    joined: dict[tuple[int, str], str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            ((_, text),) = event["delta"].items()
            joined[event["index"], kind] = joined.get((event["index"], kind), "") + text
    assert joined[0, "thinking_delta"] == "Is it warm?"
    whole = message(answer(asked), [last(TEXT)], TOKENIZER)["content"]
    assert joined[0, "signature_delta"] == whole[0]["signature"]
    assert joined[1, "text_delta"] == "I ask."
    assert json.loads(joined[2, "input_json_delta"]) == {"city": "Köln"}
    assert events[0]["message"]["content"] == []
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == 30


def test_thinking_is_left_out_or_emptied_as_requested() -> None:
    def content(**thinking: Any) -> list[dict[str, Any]]:
        asked = body(tools=[WEATHER], thinking=thinking)
        made: list[dict[str, Any]] = message(answer(asked), [last(TEXT)], TOKENIZER)["content"]
        return made

    assert [block["type"] for block in content(type="disabled")] == ["text", "tool_use"]
    assert content(type="adaptive", display="omitted")[0]["thinking"] == ""
    assert content(type="adaptive", display="summarized")[0]["thinking"] == "Is it warm?"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("end_turn", None)),
        ({"stop_reason": "END"}, ("stop_sequence", "END")),
        ({"stop_reason": 7}, ("end_turn", None)),
        ({"finish_reason": "length", "generated_tokens": 50}, ("max_tokens", None)),
        ({"finish_reason": "length"}, ("model_context_window_exceeded", None)),
    ],
)
def test_the_stop_reason_says_why_the_answer_ended(fields: dict[str, Any], expected: tuple[str, str | None]) -> None:
    made = message(answer(body(tools=[WEATHER])), [last("Hi", **fields)], TOKENIZER)
    assert (made["stop_reason"], made["stop_sequence"]) == expected


def test_an_empty_answer_has_one_empty_block() -> None:
    made = message(answer(body(tools=[WEATHER])), [last("")], TOKENIZER)
    assert [block["text"] for block in made["content"]] == [""]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (503, "overloaded_error"), (500, "api_error")],
)
def test_errors_have_the_types_of_the_api(status: int, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": "why"}, "request_id": "r"}
    assert error_body(ApiError(status, "why"), "r") == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "api_error", "message": SORRY}, "request_id": "r1"}),
        (
            "/messages/count_tokens",
            {"type": "error", "error": {"type": "api_error", "message": SORRY}, "request_id": "r1"},
        ),
        (
            "/v1/responses",
            {"error": {"message": SORRY, "type": "server_error", "param": None, "code": None}},
        ),
    ],
)
async def test_an_unexpected_error_has_the_format_of_its_path(
    path: str, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(scope: Scope, _: Receive, __: Send) -> None:
        raise KeyError(scope["path"])

    app = RequestLog(broken, FrontendMetrics(), None, partial(formatted_error, ERROR_RESPONSES))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        answer = await client.post(path, json={}, headers={"x-request-id": "r1"})
    assert (answer.status_code, answer.json()) == (500, expected)
    assert answer.headers["x-request-id"] == "r1"
    assert f"{path} failed (request r1)" in caplog.text
