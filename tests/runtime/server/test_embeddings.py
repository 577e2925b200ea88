"""Embeddings and scores over HTTP, against transformers' hidden states of the same checkpoint."""

from __future__ import annotations

import base64
import json
import os
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from transformers import AutoModel

TEXTS = ["Paris is the capital of France.", "Wasser kocht bei 100 Grad.", "ab" * 40]
CLOSE = {"atol": 1e-4, "rtol": 0.0}
LONGEST = 512
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "8Mi", "--frontend-replicas", "1", "--block-size-tokens", "8")
KEY = "first-key"

States = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture(scope="module")
def states(tiny_checkpoint: Path) -> States:
    """``states(tokens)``: transformers' hidden states, [tokens, hidden size]."""
    model = AutoModel.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()

    def compute(tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            last: torch.Tensor = model(torch.tensor([list(tokens)])).last_hidden_state[0]
        return last

    return compute


@pytest.fixture(scope="module")
def pod(pod_type: type[Any], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One rank that pools the last token; two API keys."""
    flags = ("--max-sequence-length", str(LONGEST), "--api-key", KEY, "--api-key", "second-key")
    started = pod_type(tmp_path_factory.mktemp("pod"), "--model", str(tiny_checkpoint), *FLAGS, *flags)
    try:
        started.wait_ready()
        started.http.headers["authorization"] = f"Bearer {KEY}"
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def client(pod: Any) -> Iterator[OpenAI]:
    """OpenAI's client with a key."""
    with httpx.Client(timeout=60, trust_env=False) as http:
        yield OpenAI(base_url=f"http://{pod.host}:8000/v1", api_key=KEY, max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def divided(pod_type: type[Any], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two pipeline stages that pool means."""
    flags = ("--pipeline-parallel", "2", "--pooling", "mean")
    started = pod_type(tmp_path_factory.mktemp("divided"), "--model", str(tiny_checkpoint), *FLAGS, *flags)
    try:
        yield started.wait_ready()
    finally:
        started.end()


def unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=0)


def embed(pod: Any, value: Any, **fields: Any) -> dict[str, Any]:
    """The body of an answer."""
    answer = pod.post("/v1/embeddings", {"input": value, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def vectors(body: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([each["embedding"] for each in body["data"]])


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}])
def test_openais_client_gets_normalized_hidden_states(client: OpenAI, states: States, encoding: dict[str, Any]) -> None:
    answer = client.embeddings.create(model="chat", input=TEXTS, **encoding)
    expected = torch.stack([unit(states(text.encode())[-1]) for text in TEXTS])
    torch.testing.assert_close(torch.tensor([each.embedding for each in answer.data]), expected, **CLOSE)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert (answer.object, answer.model) == ("list", "chat")
    length = sum(len(text.encode()) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (length, length)


def test_every_form_of_input_and_encoding_has_the_same_embedding(pod: Any) -> None:
    text, tokens = TEXTS[0], list(TEXTS[0].encode())
    (wanted,) = vectors(embed(pod, text))
    for value in (text, [text], tokens, [tokens]):
        assert torch.equal(vectors(embed(pod, value))[0], wanted)
    encoded = base64.b64decode(embed(pod, text, encoding_format="base64")["data"][0]["embedding"])
    assert torch.equal(torch.tensor(struct.unpack("<32f", encoded)), wanted)
    raw = vectors(embed(pod, text, use_activation=False))[0]
    assert raw.norm() > 1.5
    torch.testing.assert_close(unit(raw), wanted, **CLOSE)


def test_long_inputs_are_truncated_on_the_requested_side(pod: Any) -> None:
    text = TEXTS[0]
    for fields, kept in (
        ({}, text[:5]),
        ({"truncation_side": "right"}, text[:5]),
        ({"truncation_side": "left"}, text[-5:]),
    ):
        body = embed(pod, text, truncate_prompt_tokens=5, **fields)
        assert body["usage"]["prompt_tokens"] == 5
        assert torch.equal(vectors(body), vectors(embed(pod, kept)))
    assert embed(pod, list(b"abcdef"), truncate_prompt_tokens=2)["usage"]["prompt_tokens"] == 2
    assert embed(pod, "a" * 600, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == LONGEST


def test_scores_are_cosine_similarities(pod: Any, states: States) -> None:
    first, *others = [unit(states(text.encode())[-1]) for text in TEXTS]
    one_to_many = pod.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    assert [each["index"] for each in one_to_many["data"]] == [0, 1]
    found = torch.tensor([each["score"] for each in one_to_many["data"]])
    torch.testing.assert_close(found, torch.stack([first @ other for other in others]), **CLOSE)
    assert one_to_many["usage"]["prompt_tokens"] == sum(len(text) for text in TEXTS)
    pairs = pod.post("/score", {"queries": TEXTS, "documents": TEXTS[::-1]}).json()
    found = torch.tensor([each["score"] for each in pairs["data"]])
    torch.testing.assert_close(found, torch.stack([first @ others[1], torch.tensor(1.0), first @ others[1]]), **CLOSE)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("embeddings", {"input": "a", "dimensions": 8}, "dimensions", "does not support matryoshka representation"),
        ("embeddings", {"input": ""}, "input", "must not be empty"),
        ("embeddings", {"input": []}, "input", "must not be empty"),
        ("embeddings", {"input": ["a", []]}, "input", "valid"),
        ("embeddings", {"input": [[1], [999]]}, "input", "outside the vocabulary"),
        ("embeddings", {"input": "a" * 513}, "input", "maximum context length is 512 tokens"),
        ("embeddings", {"input": "\ud800"}, "input", "lone surrogate"),
        ("embeddings", {"input": ["a"] * 2049}, None, "input has 2049 entries; give at most 2048"),
        ("embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ("embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no prompt"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 9000}, "truncate_prompt_tokens", "reduce it"),
        ("embeddings", {"input": "a", "cache_salt": "s" * 256}, "cache_salt", "at most 255"),
        ("score", {"text_1": "a"}, None, "queries and documents, or text_1 and text_2"),
        ("score", {"text_1": "a", "documents": "b"}, None, "and no other pair"),
        ("score", {"text_1": ["a", "b"], "text_2": "c"}, None, "text_1 has 2 texts and text_2 1"),
        ("score", {"queries": "a", "documents": []}, None, "documents must have at least one text"),
        ("score", {"queries": "a", "documents": ["b", ""]}, "documents", "must not be empty"),
    ],
)
def test_an_invalid_field_is_refused_by_name(
    pod: Any, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    content = json.dumps({"model": "chat", **body})
    answer = pod.http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert words in error["message"]
    assert param is None or error["param"].split(".")[0] == param


def test_keys_are_required_and_have_separate_prefixes(pod: Any) -> None:
    def cached(key: str) -> int:
        answer = pod.post("/v1/embeddings", {"input": "a prompt of one tenant"}, authorization=f"Bearer {key}")
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(KEY), cached(KEY), cached("second-key")] == [0, 16, 0]
    assert pod.post("/v1/embeddings", {"input": "a"}, authorization="Bearer other").status_code == 401
    assert pod.post("/v1/score", {"text_1": "a", "text_2": "a"}, authorization="Bearer other").status_code == 401
    assert pod.post("/v1/score", {"model": "other", "text_1": "a", "text_2": "a"}).status_code == 404


def test_embeddings_are_counted_as_answers(pod: Any) -> None:
    def values() -> dict[str, float]:
        text = httpx.get(f"http://{pod.host}:9001/metrics", trust_env=False).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    before = values()
    embed(pod, ["abc", "defgh"])
    after = values()
    for name, difference in (
        ("megatron_prompt_tokens_total", 8),
        ('megatron_finished_answers_total{reason="stop"}', 2),
        ('megatron_requests_total{endpoint="/v1/embeddings",status="200"}', 1),
    ):
        assert after[name] - before.get(name, 0) == difference, name


def test_two_stages_give_the_mean_without_cached_prefixes(divided: Any, states: States) -> None:
    text = "The mean of many tokens. " * 30
    expected = torch.stack([unit(states(each.encode()).mean(0)) for each in (text, TEXTS[0])])
    for _ in range(2):
        body = embed(divided, [text, TEXTS[0]])
        torch.testing.assert_close(vectors(body), expected, **CLOSE)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_request_survives_pause_and_a_restart_of_the_engine(divided: Any) -> None:
    wanted, restarts = vectors(embed(divided, TEXTS)), divided.state()["restarts"]
    divided.signal("pause")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(embed, divided, TEXTS)
        divided.wait_for(lambda state: state["requests"]["waiting"] == len(TEXTS))
        os.kill(divided.child("megatron_runtime.rank"), signal.SIGKILL)
        divided.wait_for(lambda state: state["restarts"] == restarts + 1)
        divided.wait_for(lambda state: state["engineState"] == "PAUSED" and state["requests"]["waiting"] == len(TEXTS))
        divided.signal("unpause")
        assert torch.equal(vectors(answer.result(60)), wanted)
