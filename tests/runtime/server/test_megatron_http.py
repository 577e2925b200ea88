"""``--megatron-http``: requests as clients of Megatron's server send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

LONGEST = 512
BOS = "<s>"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}:"
PROMPT = "a word"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}


@pytest.fixture(scope="module")
def pod(pod_type: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("pod")
    model = write_tiny_checkpoint(folder / "tiny", longest=LONGEST, experts=4, marks=(BOS,), chat_template=TEMPLATE)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": BOS}))
    flags = "--dtype float32 --kv-cache-memory 16Mi --frontend-replicas 1 --megatron-http --moe-enable-routing-replay"
    pod = pod_type(folder, "--model", str(model), *flags.split(), MEGATRON_PROFILE_FOLDER=str(folder / "profiles"))
    pod.profiles = folder / "profiles"
    try:
        yield pod.wait_ready()
    finally:
        pod.end()


def ask(pod: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    answer: httpx.Response = pod.http.post(path, json=body)
    return answer


def chat(pod: Any, **fields: Any) -> dict[str, Any]:
    answer = ask(pod, "/chat/completions", {**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def tokens_of(pod: Any, text: str) -> list[int]:
    tokens: list[int] = ask(pod, "/tokenize", {"prompt": text}).json()["tokens"]
    return tokens


@pytest.mark.parametrize("named", [{}, {"model": ""}, {"model": "EMPTY"}])
def test_any_model_name_or_none_is_served(pod: Any, named: dict[str, str]) -> None:
    answer = ask(pod, "/completions", {"prompt": PROMPT, "max_tokens": 2, **named})
    assert answer.status_code == 200
    assert answer.json()["model"] == (named.get("model") or "chat")


def test_the_id_of_an_answer_is_the_uid_of_its_request(pod: Any) -> None:
    ids = [ask(pod, "/completions", {"prompt": PROMPT, "max_tokens": 1}).json()["id"] for _ in range(2)]
    assert len({UUID(hex=number) for number in ids}) == 2


def test_top_p_0_is_greedy_unless_there_is_a_temperature(pod: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "seed": 7}

    def text(**fields: Any) -> str:
        return str(ask(pod, "/completions", {**body, **fields}).json()["choices"][0]["text"])

    greedy = text(temperature=0)
    assert text(temperature=2, top_p=0.0) == text(temperature=2) != greedy
    assert text(temperature=0, top_p=0.0) == greedy
    assert text(top_k=1, top_p=0) == greedy
    assert text(top_p=0.0) == text(top_p=0.0, temperature=None) == greedy


def test_a_chat_answer_has_what_megatrons_rl_code_reads(pod: Any) -> None:
    choice = chat(
        pod, temperature=1, top_p=0.0, seed=1, logprobs=True, return_raw_text=True, skip_prompt_log_probs=True
    )
    message = choice["message"]
    assert message["prompt_token_ids"] == tokens_of(pod, f"{BOS}{PROMPT}:")
    assert len(message["generation_log_probs"]) == len(message["generation_token_ids"]) == 8
    assert message["raw_text"] == f"{BOS}{PROMPT}:{message['content']}"
    assert "prompt_log_probs" not in choice


@pytest.mark.parametrize("stream", [True, False])
def test_the_answers_of_a_mixture_of_experts_have_the_experts_of_each_token(pod: Any, stream: bool) -> None:
    answer = ask(pod, "/chat/completions", {**CHAT, "stream": stream, "ignore_eos": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choice = json.loads(lines[-1])["choices"][0] if stream else answer.json()["choices"][0]
    prompt = len(f"{BOS}{PROMPT}:") - len(BOS) + 1
    assert [len(layers) for layers in choice["moe_topk_indices"]] == [2] * (prompt + 8 - 1)
    assert choice["prompt_moe_topk_indices"] == choice["moe_topk_indices"][:prompt]
    assert all(0 <= expert < 4 for layers in choice["moe_topk_indices"] for layer in layers for expert in layer)


def test_a_chat_without_prevent_retokenization_has_token_ids_only_on_request(pod: Any) -> None:
    assert "prompt_token_ids" not in chat(pod, prevent_retokenization=False)["message"]
    assert "prompt_token_ids" in chat(pod, prevent_retokenization=False, return_tokenized_data=True)["message"]


@pytest.mark.parametrize(("add", "start"), [(True, BOS), (False, "")])
def test_add_bos_sets_the_beginning_of_the_prompt(pod: Any, add: bool, start: str) -> None:
    assert chat(pod, add_BOS=add)["message"]["prompt_token_ids"] == tokens_of(pod, f"{start}{PROMPT}:")
    asked = {"prompt": PROMPT, "max_tokens": 1, "add_BOS": add, "return_token_ids": True}
    assert ask(pod, "/completions", asked).json()["choices"][0]["prompt_token_ids"] == tokens_of(
        pod, f"{start}{PROMPT}"
    )


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_log_probs_are_returned_unless_they_are_skipped(pod: Any, stream: bool) -> None:
    asked = {**CHAT, "logprobs": True, "skip_prompt_log_probs": False, "stream": stream}
    answer = ask(pod, "/chat/completions", asked)
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
    else:
        choices = answer.json()["choices"]
    (scores,) = [choice["prompt_log_probs"] for choice in choices if "prompt_log_probs" in choice]
    echo = {"prompt": tokens_of(pod, f"{BOS}{PROMPT}:"), "max_tokens": 0, "echo": True, "logprobs": 0}
    expected = ask(pod, "/completions", echo).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert scores == pytest.approx(expected[1:], abs=1e-5)


def test_a_limit_beyond_the_context_is_reduced(pod: Any) -> None:
    asked = {"prompt": [5] * (LONGEST - 3), "max_tokens": 10_000, "ignore_eos": True, "temperature": 0}
    assert ask(pod, "/completions", asked).json()["usage"]["completion_tokens"] == 3


def test_a_prompt_beyond_the_context_is_refused_with_the_text_that_clients_search_for(pod: Any) -> None:
    answer = ask(pod, "/chat/completions", {"messages": [{"role": "user", "content": "x" * LONGEST}]})
    assert answer.status_code == 400
    assert "This model's maximum context length was exceeded" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("server", ["control", "http"])
def test_both_servers_record_a_trace_of_the_steps(pod: Any, server: str) -> None:
    http = getattr(pod, server)
    written = pod.log.read_text().count("wrote the trace")
    assert http.post("/start_profile").json() == {"status": "ok", "action": "start_profile"}
    assert ask(pod, "/completions", {"prompt": PROMPT, "max_tokens": 2}).status_code == 200
    assert http.post("/v1/stop_profile").json() == {"status": "ok", "action": "stop_profile"}
    pod.wait_for(lambda _: pod.log.read_text().count("wrote the trace") > written, seconds=20)
    trace = max(pod.profiles.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("linear" in str(name) for name in names)


def test_a_body_that_is_no_object_is_refused(pod: Any) -> None:
    assert ask(pod, "/completions", [1]).status_code == 400  # type: ignore[arg-type]
