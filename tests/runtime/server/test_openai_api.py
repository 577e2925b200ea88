"""What clients of OpenAI's API expect beside plain answers: limits, errors, ids, tokens, and the responses endpoint."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model

KEY = "key-of-the-tests"
ORIGIN = "https://chat.example"
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENDLESS = {"model": "chat", "messages": STORY, "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def pod(pod_type: Any, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pod whose one frontend takes little, and asks for a key."""
    folder = tmp_path_factory.mktemp("pod")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    flags = "--kv-cache-memory 512Mi --frontend-replicas 1 --max-in-flight 2 --max-body 64Ki --body-timeout 1"
    flags += f" --cors-origin {ORIGIN} --access-log json"
    pod = pod_type(folder, "--model", str(smollm2_path), *flags.split(), MEGATRON_API_KEYS_FILE=str(keys))
    try:
        pod.wait_ready()
        pod.http.headers["Authorization"] = f"Bearer {KEY}"
        pod.openai = pod.openai.with_options(api_key=KEY)
        yield pod
    finally:
        pod.end()


def post(pod: Any, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    answer: httpx.Response = pod.http.post(path, json={"model": "chat", **body}, headers=headers)
    return answer


def access_entries(pod: Any) -> list[dict[str, Any]]:
    lines = pod.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"log": "access"')]


# Refusals


def test_fields_that_nobody_knows_are_ignored(pod: Any) -> None:
    body = {"messages": STORY, "max_tokens": 2, "a_field_of_tomorrow": {"x": 1}, "stream_options": None}
    assert post(pod, "/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ("completions", {"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        ("completions", {"prompt": "a", "logprobs": 1, "echo": True, "stream": True}, "logprobs", "stream: false"),
        ("completions", {"prompt": [[1], [999999]]}, "prompt", "outside the vocabulary"),
        ("completions", {"prompt": "a", "stop_token_ids": [10**30]}, "stop_token_ids", "outside the vocabulary"),
        ("completions", {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "no token id"),
        ("completions", {"prompt": "a", "priority": 1}, "priority", "not supported"),
        ("completions", {"prompt": "a", "timeout": 0}, "timeout", "greater than 0"),
        ("chat/completions", {"messages": STORY, "response_format": {"type": "json_schema"}}, None, "json_schema goes"),
        ("chat/completions", {"messages": STORY, "guided_regex": "a("}, "guided_regex", "unclosed group"),
        ("chat/completions", {"messages": STORY, "guided_json": {"type": "x"}}, "guided_json", "Invalid type"),
        ("completions", {"prompt": "a", "guided_json": {}, "guided_regex": "a"}, "guided_regex", "leave one out"),
        ("completions", {"prompt": "a", "guided_choice": ["a"], "min_tokens": 2}, "min_tokens", "a grammar"),
        (
            "chat/completions",
            {"messages": STORY, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "the server itself",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "template refuses"),
        ("completions", {"prompt": "a\ud800"}, "prompt", "half of a surrogate pair"),
        (
            "responses",
            {"input": "a", "max_output_tokens": 1, "metadata": {"a": "\ud800"}},
            None,
            "half of a surrogate pair",
        ),
        ("responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "input_text"),
        ("responses", {"input": "a", "max_output_tokens": 10**6}, "max_output_tokens", "ask for at most"),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools", "not supported"),
        ("embeddings", {"input": "a"}, "model", "has no embeddings"),
    ],
)
def test_what_can_not_be_done_is_refused_with_its_field(
    pod: Any, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    content = json.dumps({"model": "chat", **body})
    answer = pod.http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert param is None or error["param"] == param


def test_every_refusal_has_the_same_shape(pod: Any) -> None:
    answers = [
        (401, pod.http.get("/v1/models", headers={"Authorization": "Bearer wrong"})),
        (401, pod.http.post("/tokenize", json={"prompt": "a"}, headers={"Authorization": ""})),
        (404, pod.http.get("/v2/models")),
        (404, post(pod, "/v1/responses", {"model": "gpt-4", "input": "a"})),
        (404, post(pod, "/v1/embeddings", {"model": "gpt-4", "input": "a"})),
        (405, pod.http.get("/v1/chat/completions")),
        (413, post(pod, "/v1/completions", {"prompt": "x" * 70_000})),
        (400, pod.http.post("/v1/completions", content=b"prompt=a")),
        (400, pod.http.post("/v1/completions", content=b"[" * 60_000, headers={"content-type": "application/json"})),
        (400, pod.http.post("/v1/completions", json=[1])),
    ]
    for status, answer in answers:
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_does_not_come_is_given_up(pod: Any) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 50\r\n"
    with socket.create_connection((pod.host, 8000), timeout=20) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.1 408")
    assert "body_timeout" in answer


def test_a_request_may_say_how_long_it_waits(pod: Any) -> None:
    answer = post(pod, "/v1/chat/completions", {**ENDLESS, "timeout": 0.2})
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    pod.wait_for(lambda state: state["requests"]["running"] == 0, seconds=10)


def test_a_full_queue_asks_to_come_back_later(pod: Any) -> None:
    with pod.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "n": 2, "stream": True}) as stream:
        lines = stream.iter_lines()  # the connection lasts as long as this does
        assert next(lines).startswith("data: ")
        with pytest.raises(openai.RateLimitError) as caught:
            pod.openai.chat.completions.create(model="chat", messages=STORY, max_tokens=2)
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) > 0
    pod.wait_for(lambda state: state["requests"]["running"] == 0, seconds=10)
    pod.openai.chat.completions.create(model="chat", messages=STORY, max_tokens=2)


# Names, traces, logs and browsers


def test_a_request_keeps_its_id_and_its_trace(pod: Any) -> None:
    answer = post(pod, "/tokenize", {"prompt": "a"}, **{"X-Request-Id": "mine-1", "traceparent": TRACE})
    assert (answer.headers["x-request-id"], answer.headers["traceparent"]) == ("mine-1", TRACE)
    (entry,) = [entry for entry in access_entries(pod) if entry["request_id"] == "mine-1"]
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/tokenize", 200)
    assert (entry["trace_id"], entry["parent_span_id"]) == (TRACE[3:35], TRACE[36:52])


def test_a_request_without_an_id_gets_one_that_clients_can_tell(pod: Any) -> None:
    answer = pod.openai.chat.completions.create(model="chat", messages=STORY, max_tokens=2)
    assert len(answer._request_id) == 32
    refused = post(pod, "/v1/completions", {}, **{"X-Request-Id": "two words"})
    assert refused.headers["x-request-id"] != "two words"
    assert "traceparent" not in refused.headers


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_tells_of_a_client_that_left(pod: Any, stream: bool) -> None:
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


def test_pages_of_a_chosen_origin_may_read_answers(pod: Any) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    preflight = pod.http.options("/v1/chat/completions", headers=asked)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, ORIGIN)
    refused = pod.http.get("/v1/models", headers={"Origin": ORIGIN, "Authorization": "Bearer wrong"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    other = pod.http.get("/v1/models", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


# What there is beside answers


def test_tokens_become_text_and_text_becomes_tokens(pod: Any) -> None:
    tokens = post(pod, "/tokenize", {"prompt": "Hello wörld", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == pod.openai.models.retrieve("chat").max_model_len
    assert post(pod, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Hello wörld"}
    chat = post(pod, "/tokenize", {"messages": STORY}).json()
    answer = pod.openai.chat.completions.create(model="chat", messages=STORY, max_tokens=1)
    assert chat["count"] == answer.usage.prompt_tokens
    closed = post(pod, "/tokenize", {"messages": STORY, "add_generation_prompt": False}).json()
    assert closed["tokens"] == chat["tokens"][: closed["count"]]
    assert post(pod, "/tokenize", {"messages": STORY, "prompt": "a"}).status_code == 400


def test_probes_and_the_version_need_no_key(pod: Any) -> None:
    for path in ("/health", "/ready", "/version", "/v1/health", "/openapi.json"):
        assert pod.http.get(path, headers={"Authorization": ""}).status_code == 200
    assert pod.http.get("/version").json()["version"]


def test_the_api_describes_itself_with_examples_that_work(pod: Any) -> None:
    described = pod.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"} <= set(described["paths"])
    for path, methods in described["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            if example is not None:
                assert pod.http.post(path, json={**example, "model": "chat"}).status_code == 200


def test_paths_without_their_version_work_too(pod: Any) -> None:
    assert post(pod, "/chat/completions", {"messages": STORY, "max_tokens": 1}).status_code == 200
    assert pod.http.get("/models").json() == pod.http.get("/v1/models").json()


# Tokens in and out


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_come_back_when_asked_for(pod: Any, stream: bool) -> None:
    asked = {"model": "chat", "prompt": [19556, 28], "temperature": 0, "max_tokens": 6, "logprobs": 1, "stream": stream}
    fields = {"return_token_ids": True, "return_tokenized_data": True}
    answer = pod.openai.completions.create(**asked, extra_body=fields)
    pieces = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert pieces[0].prompt_token_ids == [19556, 28]
    assert pieces[-1].generation_token_ids == tokens
    assert len(pieces[-1].generation_log_probs) == len(tokens) == 6
    text = "".join(piece.text for piece in pieces)
    assert post(pod, "/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_goes_on_with_exactly_the_tokens_it_had(pod: Any, stream: bool) -> None:
    def tokens_of(text: str) -> list[int]:
        found: list[int] = post(pod, "/tokenize", {"prompt": text}).json()["tokens"]
        return found

    asked = {"model": "chat", "messages": STORY, "temperature": 0, "max_tokens": 5, "stream": stream}
    first = pod.openai.chat.completions.create(**asked, extra_body={"return_tokenized_data": True})
    said = [chunk.choices[0].delta for chunk in first][-1] if stream else first.choices[0].message
    assert len(said.generation_token_ids) == 5
    split = [*tokens_of("H"), *tokens_of("ello")]
    assert split != tokens_of("Hello")
    answered = {"role": "assistant", "content": "Hello", "prompt_token_ids": said.prompt_token_ids}
    messages = [*STORY, {**answered, "generation_token_ids": split}, {"role": "user", "content": "And then?"}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    kept = post(pod, "/v1/chat/completions", body).json()["prompt_token_ids"]
    anew = post(pod, "/v1/chat/completions", {**body, "prevent_retokenization": False}).json()["prompt_token_ids"]
    before = len(said.prompt_token_ids)
    assert kept[: before + 2] == [*said.prompt_token_ids, *split]
    assert anew[: before + 1] == [*said.prompt_token_ids, *tokens_of("Hello")]
    assert kept[before + 2 :] == anew[before + 1 :]


def test_an_echoed_prompt_has_the_log_probabilities_of_its_generation(pod: Any) -> None:
    asked = {"model": "chat", "temperature": 0, "logprobs": 2}
    made = pod.openai.completions.create(
        **asked, prompt="Monday, Tuesday,", max_tokens=5, extra_body={"return_token_ids": True}
    ).choices[0]
    whole = [*made.prompt_token_ids, *made.token_ids]
    echoed = pod.openai.completions.create(**asked, prompt=whole, max_tokens=0, echo=True)
    choice = echoed.choices[0]
    assert choice.text == f"Monday, Tuesday,{made.text}"
    assert echoed.usage.completion_tokens == 0
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(whole)
    assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[-5:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [choice.text[at : at + 1] for at in choice.logprobs.text_offset] == [t[0] for t in choice.logprobs.tokens]
    plus_one = pod.openai.completions.create(**asked, prompt=whole, max_tokens=1, echo=True).choices[0].logprobs
    assert plus_one.token_logprobs[:-1] == pytest.approx(choice.logprobs.token_logprobs)


def test_an_echo_opens_a_stream(pod: Any) -> None:
    asked = {"model": "chat", "prompt": "Monday,", "temperature": 0, "max_tokens": 4, "echo": True}
    whole = pod.openai.completions.create(**asked).choices[0].text
    pieces = [chunk.choices[0].text for chunk in pod.openai.completions.create(**asked, stream=True)]
    assert whole.startswith("Monday,")
    assert "".join(pieces) == whole


# Responses


def test_a_response_is_what_the_chat_would_say(pod: Any) -> None:
    asked: dict[str, Any] = {"model": "chat", "temperature": 0}
    messages = [{"role": "system", "content": "Be brief."}, *STORY]
    chat = pod.openai.chat.completions.create(**asked, messages=messages, max_tokens=12)
    response = pod.openai.responses.create(
        **asked, instructions="Be brief.", input=STORY[0]["content"], max_output_tokens=12, metadata={"a": "b"}
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 12
    assert response.metadata == {"a": "b"}


def test_a_response_goes_on_from_the_items_of_another(pod: Any) -> None:
    first = pod.openai.responses.create(model="chat", input="Hello", max_output_tokens=3)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    items += [item.model_dump() for item in first.output]
    items += [{"role": "developer", "content": "Shout."}]
    again = pod.openai.responses.create(model="chat", input=items, max_output_tokens=3, top_logprobs=2)
    assert again.usage.input_tokens > first.usage.input_tokens
    assert len(again.output[0].content[0].logprobs) == 3
    assert len(again.output[0].content[0].logprobs[0].top_logprobs) == 2


def test_a_response_is_built_up_by_events(pod: Any) -> None:
    ends_after_six = {"logit_bias": {"2": 100}, "min_tokens": 6}
    asked = {"model": "chat", "input": STORY, "temperature": 0, "max_output_tokens": 8, "extra_body": ends_after_six}
    with pod.openai.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len(deltas) > 3
    assert "".join(deltas) == pod.openai.responses.create(**asked).output_text
    assert final.usage.output_tokens == 7


def test_a_stream_of_events_tells_of_its_failure(pod: Any) -> None:
    asked = {"input": STORY, "ignore_eos": True, "max_output_tokens": 4000, "stream": True, "timeout": 0.3}
    text = post(pod, "/v1/responses", asked).text
    last = json.loads(text.rstrip().rsplit("data: ", 1)[1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "deadline_exceeded"


# Answers of a given form


class Lighthouse(BaseModel):
    """What a structured answer tells."""

    name: Literal["Pharos", "Eddystone"]
    metres: int = Field(ge=0, le=999)
    lit: bool


@pytest.mark.parametrize("temperature", [0, 2])
def test_an_answer_keeps_to_a_pydantic_model(pod: Any, temperature: float) -> None:
    asked = {"model": "chat", "messages": STORY, "temperature": temperature, "seed": 7, "max_tokens": 60}
    parsed = pod.openai.chat.completions.parse(**asked, response_format=Lighthouse).choices[0]
    assert isinstance(parsed.message.parsed, Lighthouse)
    assert parsed.finish_reason == "stop"
    with pod.openai.chat.completions.stream(**asked, response_format=Lighthouse) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.message.parsed


def test_a_response_keeps_to_a_pydantic_model(pod: Any) -> None:
    asked = {"model": "chat", "input": STORY, "temperature": 0, "max_output_tokens": 60}
    response = pod.openai.responses.parse(**asked, text_format=Lighthouse)
    assert isinstance(response.output_parsed, Lighthouse)
    assert response.text.format.schema_["title"] == "Lighthouse"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["öffnen", 'say "no"']}, 'öffnen|say "no"'),
        ({"guided_grammar": 'start: "x" pair "x"\npair: "(" pair? ")"'}, r"x[()]{2,}x"),
        ({"guided_json": '{"enum": [1, [2, "b"]]}'}, r'1|\[2, "b"\]'),
    ],
)
def test_an_answer_keeps_to_a_form(pod: Any, fields: dict[str, Any], form: str) -> None:
    body = {"prompt": "Once", "max_tokens": 40, "temperature": 1.5, "top_p": 0.9, "seed": 3, "n": 4, **fields}
    for choice in post(pod, "/v1/completions", body).json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(form, choice["text"])


def test_free_and_guided_answers_go_side_by_side(pod: Any) -> None:
    asked = {"model": "chat", "messages": STORY, "temperature": 0, "max_tokens": 20}
    alone = pod.openai.chat.completions.create(**asked)
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.append(pod.openai.chat.completions.create(**asked)))
    thread.start()
    guided = pod.openai.chat.completions.create(**asked, response_format={"type": "json_object"})
    thread.join(60)
    assert beside[0].choices[0].message.content == alone.choices[0].message.content
    assert guided.choices[0].message.content.startswith("{")
