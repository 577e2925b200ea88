"""Fields of vLLM's API in served answers, of a Hugging Face checkpoint with a byte-level tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest

END = 256
ASKED: list[Any] = [{"role": "user", "content": "Hi"}]
FIXED = {"temperature": 0, "ignore_eos": True}


def complete(pod: Any, **fields: Any) -> dict[str, Any]:
    """The body of a completion."""
    answer = pod.post("/v1/completions", {"prompt": "Hello", "max_tokens": 12, **FIXED, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def chunks(pod: Any, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    lines = pod.post(path, {"stream": True, "max_tokens": 12, **FIXED, **fields}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_prompts_are_scored_with_the_most_likely_tokens(tiny_pod: Any) -> None:
    choice = complete(tiny_pod, prompt="abc", prompt_logprobs=2)["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [next(iter(scores)) for scores in others] == [str(ord("b")), str(ord("c"))]
    assert all(2 <= len(scores) <= 3 for scores in others)
    assert choice["logprobs"] is None
    scored = complete(tiny_pod, prompt="abc", prompt_logprobs=3, logprobs=1, echo=True)["choices"][0]
    assert [each[str(ord(c))]["logprob"] for c, each in zip("bc", scored["prompt_logprobs"][1:], strict=True)] == (
        scored["logprobs"]["token_logprobs"][1:3]
    )
    assert {len(top) for top in scored["logprobs"]["top_logprobs"][1:]} == {1}
    chat = {"messages": ASKED, "max_tokens": 2, "prompt_logprobs": 0, "return_token_ids": True}
    body = tiny_pod.post("/v1/chat/completions", chat).json()
    listed = [int(next(iter(scores))) for scores in body["prompt_logprobs"][1:]]
    assert listed == body["prompt_token_ids"][1:]
    assert body["choices"][0]["logprobs"] is None


def test_joined_bytes_of_parts_of_characters_are_the_text(tiny_pod: Any) -> None:
    fields = {"messages": ASKED, "max_tokens": 40, "logprobs": True, "top_logprobs": 3, **FIXED, "temperature": 1.5}
    choice = tiny_pod.post("/v1/chat/completions", {**fields, "seed": 1}).json()["choices"][0]
    entries = [entry for entry in choice["logprobs"]["content"] if entry["token"] != "<end>"]
    joined = bytes(byte for entry in entries for byte in entry["bytes"])
    assert joined.decode(errors="replace") == choice["message"]["content"]
    assert any(byte > 127 for byte in joined)
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert len({tuple(top["bytes"]) for top in entry["top_logprobs"]}) == 3
        assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"]


def test_tokens_are_named_by_their_ids_on_request(tiny_pod: Any) -> None:
    fields = {"logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(tiny_pod, **fields)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert token == next(iter(top))


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_that_ended_an_answer_is_reported_and_kept_on_request(tiny_pod: Any, stream: bool) -> None:
    def ask(**fields: Any) -> tuple[str, Any, str]:
        asked = {"prompt": "Hello", "allowed_token_ids": [97], **fields}
        if not stream:
            choice = complete(tiny_pod, **asked)["choices"][0]
            return choice["text"], choice["stop_reason"], choice["finish_reason"]
        pieces = [chunk["choices"][0] for chunk in chunks(tiny_pod, "/v1/completions", **asked)]
        text = "".join(piece["text"] for piece in pieces)
        return text, pieces[-1]["stop_reason"], pieces[-1]["finish_reason"]

    assert ask() == ("a" * 12, None, "length")
    assert ask(stop=["x", "aaa"], min_tokens=4) == ("aa", "aaa", "stop")
    assert ask(stop=["aaa"], include_stop_str_in_output=True) == ("aaa", "aaa", "stop")
    assert ask(stop_token_ids=[97]) == ("", 97, "stop")
    assert ask(stop_token_ids=[97], include_stop_str_in_output=True) == ("a", 97, "stop")
    assert ask(allowed_token_ids=[END], ignore_eos=False) == ("", None, "stop")


def test_special_tokens_are_in_the_text_on_request(tiny_pod: Any) -> None:
    fields = {"allowed_token_ids": [END], "max_tokens": 3}
    assert complete(tiny_pod, **fields)["choices"][0]["text"] == ""
    assert complete(tiny_pod, **fields, skip_special_tokens=False)["choices"][0]["text"] == "<end>" * 3
    streamed = chunks(tiny_pod, "/v1/chat/completions", messages=ASKED, skip_special_tokens=False, **fields)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == "<end>" * 3


def test_each_chunk_has_the_usage_so_far_on_request(tiny_pod: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in (("/v1/completions", {"prompt": "Hello"}), ("/v1/chat/completions", {"messages": ASKED})):
        found = chunks(tiny_pod, path, stream_options=options, allowed_token_ids=[97], **asked)
        counts = [chunk["usage"]["completion_tokens"] for chunk in found]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        assert len(set(counts)) > 2
        assert len({chunk["usage"]["prompt_tokens"] for chunk in found}) == 1
        plain = chunks(tiny_pod, path, stream_options={"include_usage": True}, **asked)
        assert {json.dumps(chunk["usage"]) for chunk in plain[:-1]} == {"null"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_continues_and_echoes_its_last_message(tiny_pod: Any, stream: bool) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "Well"}]
    asked = {"messages": messages, "continue_final_message": True, "echo": True, "allowed_token_ids": [97]}
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(tiny_pod, "/v1/chat/completions", **asked)]
        assert "".join(delta.get("content", "") for delta in deltas) == "Well" + "a" * 12
        return
    body = {**asked, **FIXED, "max_tokens": 12, "return_token_ids": True}
    answer = tiny_pod.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "Well" + "a" * 12
    assert bytes(answer["prompt_token_ids"][-4:]) == b"Well"
    same = {"messages": messages, "continue_final_message": True}
    assert tiny_pod.post("/tokenize", same).json()["tokens"] == answer["prompt_token_ids"]


def test_an_answer_has_the_id_of_its_request(tiny_pod: Any) -> None:
    assert complete(tiny_pod, request_id="job-7")["id"] == "cmpl-job-7"
    for name in ("no spaces", "", "a" * 129):
        refused = tiny_pod.post("/v1/completions", {"prompt": "a", "request_id": name})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")
    assert complete(tiny_pod, request_id="a" * 128)["id"] == f"cmpl-{'a' * 128}"


def test_a_chat_template_of_a_request_is_refused_with_the_flag(tiny_pod: Any) -> None:
    refused = tiny_pod.post("/v1/chat/completions", {"messages": ASKED, "chat_template": "{{ messages }}"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in refused.json()["error"]["message"]
