"""Limits, errors, request ids, the access log, and the description of the server."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

KEY = "key-of-the-tests"
ORIGIN = "https://chat.example"
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WIDE = {"properties": {f"p{number}": {} for number in range(1001)}}
ENDLESS = {"model": "chat", "messages": STORY, "max_tokens": 16_000, "ignore_eos": True}
"""Takes a tiny model at least some seconds."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def pod(pod_type: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pod with one frontend with low limits, which requires a key and has no page."""
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), longest=16_384, chat_template=TEMPLATE)
    folder = tmp_path_factory.mktemp("pod")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    flags = "--kv-cache-memory 64Mi --frontend-replicas 1 --max-in-flight 2 --max-body 64Ki --body-timeout 1"
    flags += f" --cors-origin {ORIGIN} --access-log json --no-page"
    pod = pod_type(folder, "--model", str(model), *flags.split(), MEGATRON_API_KEYS_FILE=str(keys))
    try:
        pod.wait_ready()
        pod.http.headers["Authorization"] = f"Bearer {KEY}"
        pod.openai = pod.openai.with_options(api_key=KEY)
        yield pod
    finally:
        pod.end()


def access_entries(pod: Any) -> list[dict[str, Any]]:
    lines = pod.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"log": "access"')]


# Refusals


def test_unknown_fields_are_ignored(pod: Any) -> None:
    body = {"messages": STORY, "max_tokens": 2, "a_field_of_tomorrow": {"x": 1}, "stream_options": None}
    assert pod.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ("completions", {"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        ("completions", {"prompt": [[1], [999999]]}, "prompt", "outside the vocabulary"),
        ("completions", {"prompt": "a", "stop_token_ids": [10**30]}, "stop_token_ids", "outside the vocabulary"),
        ("completions", {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "not a token id"),
        ("completions", {"prompt": "a", "bad_words": ["no", " "]}, "bad_words", "none of them blank"),
        ("completions", {"prompt": "a", "priority": 2**31}, "priority", "less than"),
        ("completions", {"prompt": "a", "timeout": 0}, "timeout", "greater than 0"),
        ("completions", {"prompt": "a", "top_n_sigma": -1}, "top_n_sigma", "greater than or equal to 0"),
        ("completions", {"prompt": "a", "top_n_sigma": "wide"}, "top_n_sigma", "valid number"),
        ("chat/completions", {"messages": STORY, "top_n_sigma": math.inf}, "top_n_sigma", "finite number"),
        (
            "chat/completions",
            {"messages": STORY, "response_format": {"type": "json_schema"}},
            None,
            "json_schema must be set",
        ),
        ("chat/completions", {"messages": STORY, "guided_regex": "a("}, "guided_regex", "unclosed group"),
        ("chat/completions", {"messages": STORY, "guided_json": {"type": "x"}}, "guided_json", "Invalid type"),
        ("completions", {"prompt": "a", "guided_json": "[" * 9000}, "guided_json", "can't be read"),
        ("completions", {"prompt": "a", "guided_json": {}, "guided_regex": "a"}, "guided_regex", "leave one out"),
        (
            "completions",
            {"prompt": "a", "structured_outputs": {"regex": "a("}},
            "structured_outputs.regex",
            "unclosed group",
        ),
        ("completions", {"prompt": "a", "structured_outputs": {"structural_tag": "a"}}, None, "not supported"),
        ("completions", {"prompt": "a", "guided_choice": ["a"], "min_tokens": 2}, "min_tokens", "a grammar"),
        (
            "chat/completions",
            {"messages": STORY, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "reserved for the server",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "lone surrogate"),
        ("completions", {"prompt": "a\ud800"}, "prompt", "lone surrogate"),
        ("completions", {"prompt": [1] * 17_000}, "prompt", "leave no room"),
        ("completions", {"prompt": "word " * 9_000}, "prompt", "leave no room"),
        ("chat/completions", {"messages": STORY, "guided_json": WIDE}, "guided_json", "1001 properties"),
        (
            "responses",
            {"input": "a", "max_output_tokens": 1, "metadata": {"a": "\ud800"}},
            None,
            "lone surrogate",
        ),
        ("responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "input_text"),
        ("responses", {"input": "a", "max_output_tokens": 10**6}, "max_output_tokens", "request at most"),
        ("responses", {"input": "a", "tools": [{"type": "web_search", "name": "a"}]}, "tools.0.type", "'function'"),
        ("responses", {"input": "a", "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            "responses",
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]},
            "input.0",
            "must be a JSON object",
        ),
        ("responses", {"input": [{"type": "computer_call"}]}, "input.0", "one of message, function_call"),
    ],
)
def test_an_invalid_or_unsupported_field_is_refused_by_name(
    pod: Any, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    content = json.dumps({"model": "chat", **body})
    answer = pod.http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert param is None or error["param"] == param


def test_every_error_has_the_same_format(pod: Any) -> None:
    answers = [
        (401, pod.http.get("/v1/models", headers={"Authorization": "Bearer wrong"})),
        (401, pod.http.post("/tokenize", json={"prompt": "a"}, headers={"Authorization": ""})),
        (404, pod.http.get("/v2/models")),
        (404, pod.post("/v1/responses", {"model": "gpt-4", "input": "a"})),
        (404, pod.post("/v1/embeddings", {"model": "gpt-4", "input": "a"})),
        (405, pod.http.get("/v1/chat/completions")),
        (413, pod.post("/v1/completions", {"prompt": "x" * 70_000})),
        (400, pod.http.post("/v1/completions", content=b"prompt=a")),
        (400, pod.http.post("/v1/completions", content=b"[" * 60_000, headers={"content-type": "application/json"})),
        (400, pod.http.post("/v1/completions", json=[1])),
    ]
    for status, answer in answers:
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_does_not_arrive_times_out(pod: Any) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 50\r\n"
    with socket.create_connection((pod.host, 8000), timeout=20) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.1 408")
    assert "body_timeout" in answer


def test_a_request_may_set_its_timeout(pod: Any) -> None:
    answer = pod.post("/v1/chat/completions", {**ENDLESS, "timeout": 0.2})
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    pod.wait_for(lambda state: state["requests"]["running"] == 0, seconds=10)


def test_a_full_queue_returns_429_with_retry_after(pod: Any) -> None:
    with pod.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "n": 2, "stream": True}) as stream:
        lines = stream.iter_lines()  # keeps the connection open
        assert next(lines).startswith("data: ")
        with pytest.raises(openai.RateLimitError) as caught:
            pod.openai.chat.completions.create(model="chat", messages=STORY, max_tokens=2)
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) > 0
    pod.wait_for(lambda state: state["requests"]["running"] == 0, seconds=10)
    pod.openai.chat.completions.create(model="chat", messages=STORY, max_tokens=2)


# Request ids, traces, logs and CORS


def test_a_request_keeps_its_id_and_its_trace(pod: Any) -> None:
    answer = pod.post("/tokenize", {"prompt": "a"}, **{"X-Request-Id": "mine-1", "traceparent": TRACE})
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine-1", TRACE)
    pod.wait_for(lambda _: any(entry["request_id"] == "mine-1" for entry in access_entries(pod)), seconds=10)
    (entry,) = [entry for entry in access_entries(pod) if entry["request_id"] == "mine-1"]
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/tokenize", 200)
    assert (entry["trace_id"], entry["parent_span_id"]) == (TRACE[3:35], TRACE[36:52])


def test_a_request_without_an_id_gets_one_in_its_response(pod: Any) -> None:
    answer = pod.openai.chat.completions.create(model="chat", messages=STORY, max_tokens=2)
    assert len(answer._request_id) == 32
    refused = pod.post("/v1/completions", {}, **{"X-Request-Id": "two words"})
    assert refused.headers["x-request-id"] != "two words"
    assert "traceparent" not in refused.headers


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_has_a_client_that_disconnected(pod: Any, stream: bool) -> None:
    name = f"left-{stream}"

    def ask_and_leave() -> None:
        timeout = httpx.Timeout(60, read=2)
        with httpx.Client(base_url=pod.http.base_url, headers=pod.http.headers, timeout=timeout) as client:
            body = {**ENDLESS, "stream": stream}
            try:
                with client.stream("POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": name}) as answer:
                    next(answer.iter_lines())
            except httpx.ReadTimeout:
                pass

    thread = threading.Thread(target=ask_and_leave)
    thread.start()
    thread.join(30)
    pod.wait_for(lambda state: state["requests"]["running"] == 0, seconds=10)
    pod.wait_for(lambda _: any(entry["request_id"] == name for entry in access_entries(pod)), seconds=10)
    assert [entry["status"] for entry in access_entries(pod) if entry["request_id"] == name] == [499]


def test_pages_of_a_configured_origin_may_read_answers(pod: Any) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    preflight = pod.http.options("/v1/chat/completions", headers=asked)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, ORIGIN)
    refused = pod.http.get("/v1/models", headers={"Origin": ORIGIN, "Authorization": "Bearer wrong"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    other = pod.http.get("/v1/models", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


# Other routes


def test_tokens_become_text_and_text_becomes_tokens(pod: Any) -> None:
    tokens = pod.post("/tokenize", {"prompt": "Hello wörld", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == pod.openai.models.retrieve("chat").max_model_len
    assert pod.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Hello wörld"}
    chat = pod.post("/tokenize", {"messages": STORY}).json()
    answer = pod.openai.chat.completions.create(model="chat", messages=STORY, max_tokens=1)
    assert chat["count"] == answer.usage.prompt_tokens
    closed = pod.post("/tokenize", {"messages": STORY, "add_generation_prompt": False}).json()
    assert closed["count"] < chat["count"]
    assert closed["tokens"] == chat["tokens"][: closed["count"]]
    assert pod.post("/tokenize", {"messages": STORY, "prompt": "a"}).status_code == 400


def test_probes_and_the_version_need_no_key(pod: Any) -> None:
    for path in ("/health", "/ready", "/version", "/v1/health", "/openapi.json"):
        assert pod.http.get(path, headers={"Authorization": ""}).status_code == 200
    assert pod.http.get("/version").json()["version"]


def test_metrics_need_a_key_unless_endpoint_pickers_are_excepted(pod: Any) -> None:
    for path in ("/metrics", "/load"):
        assert pod.http.get(path, headers={"Authorization": ""}).status_code == 401
    text = pod.http.get("/metrics").text
    assert "megatron_requests_running" in text
    assert "vllm:num_requests_waiting" in text


def test_the_page_can_be_disabled(pod: Any) -> None:
    assert [pod.http.get(path).status_code for path in ("/", "/page/main.js", "/status")] == [404, 404, 200]


def test_paths_without_their_version_work_too(pod: Any) -> None:
    assert pod.post("/chat/completions", {"messages": STORY, "max_tokens": 1}).status_code == 200
    assert pod.http.get("/models").json() == pod.http.get("/v1/models").json()
