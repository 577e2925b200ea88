"""The endpoint with Anthropic's client, llm-comply, LiteLLM, instructor and pydantic-ai."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_support import further_python

pytestmark = pytest.mark.model

PARTS = ["content_block_start", "content_block_delta", "content_block_stop"]
EVENTS = ["message_start", *PARTS, "message_delta", "message_stop"]


REASONING = "gpt-5"
"""A name that llm-comply takes for a model that thinks."""


def printed(script: str, *words: str) -> Any:
    return json.loads(further_python.run(script, *words).splitlines()[-1])


@pytest.fixture(scope="module")
def reasoning_pod(pod_type: type[Any], smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """SmolLM2 under such a name, with texts in place of images."""
    flags = ("--dtype", "float32", "--kv-cache-memory", "256Mi", "--frontend-replicas", "1", "--media-placeholder")
    folder = tmp_path_factory.mktemp("pod")
    pod = pod_type(folder, "--model", str(smollm2_path), *flags, "--served-name", REASONING)
    try:
        yield pod.wait_ready()
    finally:
        pod.end()


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


def test_llm_comply_finds_no_error(reasoning_pod: Any) -> None:
    found = printed("compliance.py", f"{reasoning_pod.http.base_url}/v1", REASONING)
    assert {api: len(results) for api, results in found.items()} == {
        "openai-chat": 9,
        "open-responses": 13,
        "anthropic": 8,
    }
    results = [(name, *result) for each in found.values() for name, result in each.items()]
    assert {name: errors for name, errors, _ in results if errors} == {}
    # SmolLM2 does not think, and llm-comply lets /v1/responses/compact be absent.
    assert {name for name, _, warnings in results if warnings} == {"chat-reasoning-summary", "compact-response"}


def test_clients_for_structured_answers_work_in_every_mode(shared_pod: Any) -> None:
    found = printed("structured_clients.py", f"{shared_pod.http.base_url}/v1")
    assert found["litellm"] == "ContextWindowExceededError"
    assert set(found["instructor"].values()) == {"GetWeather"}, found["instructor"]
    assert set(found["pydantic_ai"].values()) == {"GetWeather"}, found["pydantic_ai"]
    assert found["pydantic_ai_responses"] == "GetWeather"
