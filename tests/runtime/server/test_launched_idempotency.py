"""Requests that are repeated with the same Idempotency-Key."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from runtime_support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, pod_type: Any) -> Iterator[Any]:
    """A small pod with a single frontend."""
    checkpoint: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    flags = ["--model", str(checkpoint), "--kv-cache-memory", "32Mi", "--frontend-replicas", "1"]
    started = pod_type(tmp_path_factory.mktemp("pod"), *flags)
    try:
        yield started.wait_ready()
    finally:
        started.end()


def ask(pod: Any, key: str, *, retries: int = 20, **fields: Any) -> str:
    """A random answer without a seed; the request is repeated when its frontend is killed."""
    asked: dict[str, Any] = {"model": "chat", "prompt": [1, 2, 3], "max_tokens": 60, **fields}
    answer = pod.openai.with_options(max_retries=retries).completions.create(
        **asked, extra_body={"ignore_eos": True}, extra_headers={"Idempotency-Key": key}
    )
    return str(answer.choices[0].text)


def submit_until_it_waits(pool: ThreadPoolExecutor, pod: Any, key: str, **fields: Any) -> Future[str]:
    """A request at a paused engine; for a short time after an answer, the same key returns the kept answer."""
    while True:
        answer = pool.submit(ask, pod, key, **fields)
        pod.wait_for(lambda state, sent=answer: sent.done() or state["requests"]["waiting"] == 1)
        if not answer.done():
            return answer


def test_equal_keys_have_equal_answers_and_other_keys_or_bodies_have_others(pod: Any) -> None:
    first = ask(pod, "a")
    assert ask(pod, "a") == first
    assert ask(pod, "b") != first
    assert ask(pod, "a", temperature=0.9) != first


def test_a_key_that_is_too_long_is_refused(pod: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="256 characters; use 1 to 255") as caught:
        ask(pod, "x" * 256)
    assert caught.value.param == "Idempotency-Key"


def test_a_request_with_a_key_survives_its_frontend(pod: Any) -> None:
    whole = ask(pod, "k", max_tokens=500)
    restarts = pod.state()["restarts"]
    pod.signal("pause")
    with ThreadPoolExecutor() as pool:
        answer = submit_until_it_waits(pool, pod, "k", max_tokens=500)
        os.kill(pod.child("server.frontend"), signal.SIGKILL)
        pod.wait_for(lambda state: state["restarts"] == restarts + 1 and state["ready"])
        pod.wait_for(lambda state: state["requests"] == {"running": 0, "waiting": 1})
        pod.signal("unpause")
        assert answer.result(60) == whole


def test_a_key_whose_request_runs_at_the_same_frontend_is_a_conflict(pod: Any) -> None:
    pod.signal("pause")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, pod, "c")
        pod.wait_for(lambda state: state["requests"]["waiting"] == 1)
        with pytest.raises(openai.ConflictError, match="is already in progress"):
            ask(pod, "c", retries=0)
        pod.signal("unpause")
        assert answer.result(60) == ask(pod, "c")
