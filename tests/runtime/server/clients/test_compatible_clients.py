"""The endpoint with Anthropic's client, llm-comply, LiteLLM, instructor and pydantic-ai."""

from __future__ import annotations

import json
from typing import Any

import pytest
from client_support import further_python

pytestmark = pytest.mark.model

PARTS = ["content_block_start", "content_block_delta", "content_block_stop"]
EVENTS = ["message_start", *PARTS, "message_delta", "message_stop"]


def printed(script: str, url: str) -> Any:
    return json.loads(further_python.run(script, url).splitlines()[-1])


def test_anthropics_client_chats_streams_calls_continues_and_gets_errors(shared_pod: Any) -> None:
    found = printed("anthropic_client.py", str(shared_pod.http.base_url))
    whole, streamed = found["whole"], found["streamed"]
    assert "Paris" in whole["content"][0]["text"]
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == found["counted"]
    assert streamed["order"] == EVENTS
    assert streamed["message"]["content"] == whole["content"]
    assert streamed["message"]["usage"]["output_tokens"] == usage["output_tokens"]
    (call,) = found["called"]["content"]
    assert (call["type"], call["name"], found["called"]["stop_reason"]) == ("tool_use", "weather", "tool_use")
    (joined,) = found["call_streamed"]["message"]["content"]
    assert joined["input"] == call["input"]
    assert found["continued"]["content"]
    assert found["begun"]["content"][0]["text"].strip() == "France is"
    assert (found["begun"]["stop_reason"], found["begun"]["stop_sequence"]) == ("stop_sequence", "Paris")
    assert found["refusals"] == [
        ["NotFoundError", "error", "not_found_error", True],
        ["BadRequestError", "error", "invalid_request_error", True],
    ]


def test_llm_comply_finds_only_that_images_are_missing(shared_pod: Any) -> None:
    found = printed("compliance.py", f"{shared_pod.http.base_url}/v1")
    failed = {api: {name for name, errors in results.items() if errors} for api, results in found.items()}
    assert {api: len(results) for api, results in found.items()} == {
        "openai-chat": 8,
        "open-responses": 12,
        "anthropic": 8,
    }
    assert failed == {
        "openai-chat": {"chat-image-input"},
        "open-responses": {"image-input"},
        "anthropic": {"anth-image-input"},
    }


def test_clients_for_structured_answers_work_in_every_mode(shared_pod: Any) -> None:
    found = printed("structured_clients.py", f"{shared_pod.http.base_url}/v1")
    assert found["litellm"] == "ContextWindowExceededError"
    assert set(found["instructor"].values()) == {"GetWeather", "JsonObject"}, found["instructor"]
    assert set(found["pydantic_ai"].values()) == {"GetWeather"}, found["pydantic_ai"]
    assert found["pydantic_ai_responses"] == "GetWeather"
