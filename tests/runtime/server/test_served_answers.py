"""The OpenAI endpoint of a real pod, with OpenAI's client."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.model

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]


def test_the_capital_of_france_is_paris(shared_pod: Any) -> None:
    answer = shared_pod.openai.chat.completions.create(model="chat", messages=FRANCE, temperature=0, max_tokens=30)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_usage_says_how_much_of_a_prompt_was_cached(shared_pod: Any) -> None:
    asked: dict[str, Any] = {"model": "chat", "messages": STORY, "temperature": 0, "max_tokens": 3}
    first = shared_pod.openai.chat.completions.create(**asked)
    again = shared_pod.openai.chat.completions.create(**asked, n=2)
    cached = (again.usage.prompt_tokens - 1) // 16 * 16
    assert again.usage.prompt_tokens_details.cached_tokens == cached > 0
    assert [choice.message for choice in again.choices] == [first.choices[0].message] * 2
    assert again.usage.prompt_tokens == first.usage.prompt_tokens


def test_a_stream_has_the_same_text_as_a_complete_answer(shared_pod: Any) -> None:
    asked: dict[str, Any] = {"model": "chat", "messages": STORY, "temperature": 0.7, "seed": 11, "max_tokens": 40}
    create = shared_pod.openai.chat.completions.create
    whole, chunks = shared_pod.together(
        lambda: create(**asked), lambda: list(create(**asked, stream=True, stream_options={"include_usage": True}))
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 10
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]


def test_log_probabilities_agree_between_stream_and_whole_answer(shared_pod: Any) -> None:
    asked: dict[str, Any] = {
        "model": "chat",
        "messages": FRANCE,
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = shared_pod.openai.chat.completions.create(**asked).choices[0].logprobs.content
    chunks = shared_pod.openai.chat.completions.create(**asked, stream=True)
    streamed = [entry for chunk in chunks for c in chunk.choices if c.logprobs for entry in c.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)
    assert all(len(entry.top_logprobs) == 3 for entry in whole)
    assert "".join(entry.token for entry in whole).strip().startswith("The capital")


def test_several_prompts_and_samples_come_back_in_order(shared_pod: Any) -> None:
    answer = shared_pod.openai.completions.create(
        model="chat", prompt=["1, 2, 3,", "Monday, Tuesday,"], n=2, temperature=0, max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert "4" in answer.choices[0].text
    assert "Wednesday" in answer.choices[2].text


def test_a_prompt_may_be_token_ids(shared_pod: Any) -> None:
    as_text = shared_pod.openai.completions.create(model="chat", prompt="Hello", temperature=0, max_tokens=5)
    ids = [19556]
    as_tokens = shared_pod.openai.completions.create(model="chat", prompt=ids, temperature=0, max_tokens=5)
    assert as_tokens.choices[0].text == as_text.choices[0].text
    assert as_tokens.usage.prompt_tokens == 1


def test_a_stop_string_ends_the_answer_before_it(shared_pod: Any) -> None:
    asked: dict[str, Any] = {"model": "chat", "messages": FRANCE, "temperature": 0, "max_tokens": 30, "stop": [" is"]}
    whole = shared_pod.openai.chat.completions.create(**asked).choices[0]
    chunks = shared_pod.openai.chat.completions.create(**asked, stream=True)
    assert whole.message.content == "The capital of France"
    assert whole.finish_reason == "stop"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == whole.message.content


def test_biases_penalties_and_a_minimum_length_change_the_answer(shared_pod: Any) -> None:
    def asking(messages: list[Any], **fields: Any) -> Any:
        asked: dict[str, Any] = {"model": "chat", "messages": messages, "temperature": 0, "max_tokens": 30}
        return partial(shared_pod.openai.chat.completions.create, **asked, extra_body=fields)

    hello = "19556"
    penalties = ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.5})
    biased, short, longer, *stories = shared_pod.together(
        asking(FRANCE, logit_bias={hello: 100}),
        asking(FRANCE),
        asking(FRANCE, min_tokens=25),
        asking(STORY),
        *(asking(STORY, **penalty) for penalty in penalties),
    )
    assert biased.choices[0].message.content == "Hello" * 30
    plain, *changed = (story.choices[0].message.content for story in stories)
    assert plain not in changed
    assert short.usage.completion_tokens < 25 <= longer.usage.completion_tokens
    assert longer.choices[0].message.content.startswith(short.choices[0].message.content)


def test_top_n_sigma_near_zero_is_greedy_at_any_temperature(shared_pod: Any) -> None:
    def asking(temperature: float, **fields: Any) -> Any:
        asked = {"model": "chat", "prompt": "Once upon a time", "max_tokens": 20, "seed": 1}
        return partial(shared_pod.openai.completions.create, **asked, temperature=temperature, extra_body=fields)

    answers = shared_pod.together(asking(2, top_n_sigma=1e-6), asking(0), asking(2))
    narrow, greedy, random = (answer.choices[0].text for answer in answers)
    assert narrow == greedy != random


def test_the_models_are_listed(shared_pod: Any) -> None:
    assert [model.id for model in shared_pod.openai.models.list()] == ["chat"]
    assert shared_pod.openai.models.retrieve("chat").id == "chat"


def test_an_unknown_model_is_not_found(shared_pod: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here") as caught:
        shared_pod.openai.chat.completions.create(model="gpt-4", messages=FRANCE)
    assert caught.value.param == "model"
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": FRANCE, "temperature": 3}, "temperature", "less than or equal to 2"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "text"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": FRANCE, "tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"messages": FRANCE, "max_tokens": 100000}, "max_tokens", "100000 tokens after a prompt of"),
        ({"messages": FRANCE, "frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"messages": FRANCE, "presence_penalty": "much"}, "presence_penalty", "number"),
        ({"messages": FRANCE, "repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"messages": FRANCE, "logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ({"messages": FRANCE, "logit_bias": {"5": 101}}, "logit_bias", "101.0 for token 5"),
        ({"messages": FRANCE, "logit_bias": {"49152": 1}}, "logit_bias", "outside the vocabulary of 49152"),
        ({"messages": FRANCE, "min_tokens": 9, "max_tokens": 8}, "min_tokens", "more than the limit of 8"),
        ({}, "messages", "required"),
    ],
)
def test_a_bad_body_is_refused_with_its_field(shared_pod: Any, body: dict[str, Any], param: str, words: str) -> None:
    answer = shared_pod.http.post("/v1/chat/completions", json={"model": "chat", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_invalid_json_and_unknown_routes_have_the_same_error_format(shared_pod: Any) -> None:
    broken = shared_pod.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert shared_pod.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    assert shared_pod.http.get("/v1/completions").status_code == 405


def test_a_body_beyond_the_limit_is_refused(shared_pod: Any) -> None:
    answer = shared_pod.http.post("/v1/completions", json={"model": "chat", "prompt": "x" * (17 * 2**20)})
    assert answer.status_code == 413


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_ends_its_request(shared_pod: Any, stream: bool) -> None:
    body = {"model": "chat", "messages": STORY, "max_tokens": 4000, "ignore_eos": True, "stream": stream}

    def ask_and_leave() -> None:
        url = f"http://{shared_pod.host}:8000/v1/chat/completions"
        with (
            httpx.Client(trust_env=False, timeout=httpx.Timeout(60, read=3)) as client,
            contextlib.suppress(httpx.ReadTimeout),
            client.stream("POST", url, json=body),
        ):
            seen.wait(30)

    seen = threading.Event()
    thread = threading.Thread(target=ask_and_leave)
    thread.start()
    shared_pod.wait_for(lambda state: state["requests"]["running"] == 1)
    seen.set()
    thread.join(30)
    shared_pod.wait_for(lambda state: state["requests"]["running"] == 0, seconds=10)


def test_metrics_count_the_served_requests(shared_pod: Any) -> None:
    shared_pod.openai.chat.completions.create(model="chat", messages=FRANCE, temperature=0, max_tokens=5)
    deadline = time.monotonic() + 10
    while True:
        text = shared_pod.control.get("/metrics").text
        if 'megatron_engine_state{state="RUNNING"} 1.0' in text or time.monotonic() > deadline:
            break
    assert 'megatron_engine_state{state="RUNNING"} 1.0' in text
    assert 'megatron_requests_total{endpoint="/v1/chat/completions",status="200"}' in text
    assert "megatron_generation_tokens_total" in text
    assert "megatron_prompt_tokens_total" in text
    assert "megatron_cached_prompt_tokens_total" in text
    assert 'megatron_kv_blocks{replica_group="0",state="free"}' in text
    assert "megatron_request_duration_seconds_bucket" in text


def test_the_api_describes_itself_with_examples_that_work(shared_pod: Any) -> None:
    described = shared_pod.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"} <= set(described["paths"])
    for path, methods in described["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            if example is not None:
                assert shared_pod.http.post(path, json={**example, "model": "chat"}).status_code == 200


def test_frontends_and_launcher_do_not_import_torch(shared_pod: Any) -> None:
    for word in ("server.frontend", "coordinator_process"):
        assert "libtorch" not in Path(f"/proc/{shared_pod.child(word)}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{shared_pod.process.pid}/maps").read_text()
