"""The control API of a real pod: pause, suspend, drain, and its token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--frontend-replicas", "1")
STORY: list[Any] = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]


def ask(pod: Any) -> str:
    """One short, deterministic answer."""
    answer = pod.openai.chat.completions.create(
        model="chat", messages=QUESTION, temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].message.content)


def waits(pod: Any, answer: Future[str]) -> bool:
    """Whether a request waits in an engine's queue."""
    state = pod.wait_for(lambda state: state["requests"]["waiting"] == 1, seconds=20)
    return not answer.done() and state["requests"]["running"] == 0


def test_a_request_to_paused_engines_waits_for_unpause(tiny_pod: Any) -> None:
    before = ask(tiny_pod)
    assert tiny_pod.signal("pause").json() == {"accepted": True, "engineState": "PAUSED"}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, tiny_pod)
        assert waits(tiny_pod, answer)
        assert tiny_pod.state()["ready"]
        assert tiny_pod.signal("unpause").json()["engineState"] == "RUNNING"
        assert answer.result(30) == before


def test_suspended_engines_answer_again_after_resume_and_unpause(tiny_pod: Any) -> None:
    before = ask(tiny_pod)
    for name, state in (("pause", "PAUSED"), ("suspend", "SUSPENDED")):
        assert tiny_pod.signal(name).json()["engineState"] == state
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, tiny_pod)
        assert waits(tiny_pod, answer)
        for name, state in (("resume", "PAUSED"), ("unpause", "RUNNING")):
            assert tiny_pod.signal(name).json()["engineState"] == state
        assert answer.result(30) == before


def test_waiting_requests_are_served_by_priority(start_pod: Callable[..., Any], tiny_checkpoint: Path) -> None:
    flags = ("--max-requests", "1", "--kv-cache-memory", "8Mi", "--frontend-replicas", "1")
    pod = start_pod("--model", str(tiny_checkpoint), *flags).wait_ready()
    served: list[int] = []

    def ask_with(priority: int) -> None:
        fields = {"priority": priority, "ignore_eos": True}
        pod.openai.completions.create(model="chat", prompt=[1, 2, 3], max_tokens=200, extra_body=fields)
        served.append(priority)

    pod.signal("pause")
    with ThreadPoolExecutor() as pool:
        for waiting, priority in enumerate((3, 0, -2), start=1):
            pool.submit(ask_with, priority)
            pod.wait_for(lambda state, waiting=waiting: state["requests"]["waiting"] == waiting)
        pod.signal("unpause")
    assert served == [-2, 0, 3]


def test_an_idle_engine_is_suspended_until_the_next_request_unless_a_client_suspends_it(
    start_pod: Callable[..., Any], tiny_checkpoint: Path
) -> None:
    flags = ("--auto-suspend-after", "1", "--kv-cache-memory", "8Mi", "--frontend-replicas", "1")
    pod = start_pod("--model", str(tiny_checkpoint), *flags).wait_ready()

    def answer() -> str:
        asked = {"prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0}
        return str(pod.post("/v1/completions", asked).json()["choices"][0]["text"])

    def sleeps(state: dict[str, Any]) -> bool:
        return bool(state["engineState"] == "SUSPENDED" and state["autoSuspended"])

    first = answer()
    assert pod.wait_for(sleeps)["ready"]
    assert answer() == first
    pod.wait_for(sleeps)
    assert pod.signal("suspend").json()["engineState"] == "SUSPENDED"
    assert not pod.state()["autoSuspended"]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(answer)
        assert waits(pod, waiting)
        with pytest.raises(FutureTimeoutError):
            waiting.result(3)
        pod.signal("resume")
        pod.signal("unpause")
        assert waiting.result(30) == first
    pod.wait_for(sleeps)


def test_a_signal_in_the_wrong_state_is_refused_with_the_allowed_signals(tiny_pod: Any) -> None:
    answer = tiny_pod.control.post("/v1/suspend")
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert (error["code"], error["engineState"], error["allowed"]) == ("InvalidState", "RUNNING", ["pause"])


def test_new_weights_load_between_pause_and_unpause_and_answers_have_their_version(
    tiny_pod: Any, tiny_checkpoint: Path
) -> None:
    before = ask(tiny_pod)

    def load(path: Path | str) -> httpx.Response:
        asked = {"wait": "true", "timeout": 60}
        answer: httpx.Response = tiny_pod.control.post("/v1/weights", params=asked, json={"path": str(path)})
        return answer

    def fingerprints(**fields: Any) -> list[str | None]:
        asked = {"model": "chat", "messages": QUESTION, "temperature": 0, "max_tokens": 5, **fields}
        answer = tiny_pod.openai.chat.completions.create(**asked)
        return [chunk.system_fingerprint for chunk in answer] if fields else [answer.system_fingerprint]

    assert fingerprints() == ["weights-0"]
    assert load(tiny_checkpoint).status_code == 409
    tiny_pod.signal("pause")
    assert load(tiny_checkpoint).json() == {"accepted": True, "engineState": "PAUSED"}
    refused = load("/nowhere.gguf")
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "InvalidWeights")
    assert "replica group 0 (attempt 0): /nowhere.gguf" in refused.json()["error"]["message"]
    tiny_pod.signal("unpause")
    assert ask(tiny_pod) == before
    assert fingerprints(stream=True)[-1] == "weights-1"
    tiny_pod.wait_for(lambda state: [replica["weightVersion"] for replica in state["replicaGroups"]] == [1])


def test_a_signal_without_wait_is_accepted_at_once(tiny_pod: Any) -> None:
    assert tiny_pod.control.post("/v1/pause").status_code == 202
    tiny_pod.wait_for(lambda state: state["engineState"] == "PAUSED")
    assert tiny_pod.control.post("/v1/unpause").status_code == 202
    tiny_pod.wait_for(lambda state: state["engineState"] == "RUNNING")


def test_a_long_poll_answers_with_the_next_change(tiny_pod: Any) -> None:
    revision = tiny_pod.state()["revision"]
    with ThreadPoolExecutor() as pool:
        poll = pool.submit(tiny_pod.control.get, "/v1/state", params={"after": revision, "timeout": 60})
        tiny_pod.signal("pause")
        assert poll.result(30).json()["revision"] > revision
    tiny_pod.signal("unpause")


def test_the_control_api_requires_its_token(tiny_pod: Any) -> None:
    url = f"http://{tiny_pod.host}:9000"
    with httpx.Client(base_url=url, trust_env=False) as stranger:
        assert stranger.get("/v1/state").status_code == 401
        assert stranger.post("/v1/pause", headers={"Authorization": "Bearer guess"}).status_code == 401
        assert stranger.get("/healthz").status_code == 200
        assert stranger.get("/readyz").status_code == 200
    assert tiny_pod.control.get("/v1/state", params={"timeout": "long"}).status_code == 400
    assert tiny_pod.control.post("/v1/explode").status_code == 404


@pytest.fixture
def pod(start_pod: Callable[..., Any], tiny_checkpoint: Path) -> Any:
    """A pod that the test may end."""
    return start_pod("--model", str(tiny_checkpoint), *FLAGS).wait_ready()


def test_sigterm_finishes_a_running_stream_and_refuses_new_requests(pod: Any) -> None:
    stream = pod.openai.chat.completions.create(
        model="chat", messages=STORY, temperature=0, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(stream), next(stream)]
    pod.process.send_signal(signal.SIGTERM)
    pod.wait_for(lambda state: state["draining"])
    with pytest.raises(openai.InternalServerError) as refused:
        ask(pod)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) > 0
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert pod.process.wait(30) == 0
    assert not pod.termination_log.exists()


def test_the_state_says_draining_once_every_frontend_refuses_requests(
    start_pod: Callable[..., Any], tiny_checkpoint: Path
) -> None:
    flags = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--frontend-replicas", "2")
    pod = start_pod("--model", str(tiny_checkpoint), *flags).wait_ready()
    stopped = pod.child("server.frontend")
    os.kill(stopped, signal.SIGSTOP)
    # The other frontend answers.
    stream = pod.openai.chat.completions.create(
        model="chat", messages=STORY, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    pod.process.send_signal(signal.SIGTERM)
    pod.wait_for(lambda _: pod.http.get("/ready").status_code == 503)
    state = pod.state()
    assert (state["ready"], state["draining"]) == (False, False)
    os.kill(stopped, signal.SIGCONT)
    pod.wait_for(lambda state: state["draining"])
    with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
        ask(pod)


def test_a_connection_during_a_drain_is_answered_while_another_frontend_has_a_request(
    start_pod: Callable[..., Any], tiny_checkpoint: Path
) -> None:
    flags = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--frontend-replicas", "2")
    pod = start_pod("--model", str(tiny_checkpoint), *flags).wait_ready()
    stream = pod.openai.chat.completions.create(
        model="chat", messages=STORY, temperature=0, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    with contextlib.ExitStack() as stack:
        connections = [http.client.HTTPConnection(pod.host, pod.http.base_url.port) for _ in range(16)]
        for connection in connections:
            stack.enter_context(contextlib.closing(connection))
            connection.connect()
        pod.process.send_signal(signal.SIGTERM)
        pod.wait_for(lambda state: state["draining"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Longer than a server takes to end once it has nothing to do.
            pod.process.wait(0.5)
        body, headers = json.dumps({"model": "chat", "prompt": [1, 2, 3]}), {"Content-Type": "application/json"}
        for connection in connections:
            connection.request("POST", "/v1/completions", body, headers)
        assert [connection.getresponse().status for connection in connections] == [503] * len(connections)
    assert next(stream)


def test_sigterm_while_paused_answers_waiting_requests_at_once(pod: Any) -> None:
    pod.signal("pause")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, pod)
        assert waits(pod, waiting)
        pod.process.send_signal(signal.SIGTERM)
        refused = waiting.exception(30)
    assert isinstance(refused, openai.InternalServerError)
    assert refused.status_code == 503
    assert int(refused.response.headers["retry-after"]) > 0
    assert pod.process.wait(30) == 0


def test_a_second_signal_ends_the_pod_at_once(pod: Any) -> None:
    stream = pod.openai.chat.completions.create(
        model="chat", messages=STORY, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    pod.process.send_signal(signal.SIGINT)
    pod.wait_for(lambda state: state["draining"])
    below = pod.children()
    with contextlib.suppress(subprocess.TimeoutExpired):
        # Signals that arrive together count as one, so this one is sent a moment later.
        pod.process.wait(0.5)
    pod.process.send_signal(signal.SIGINT)
    assert pod.process.wait(30) == 1
    assert below
    assert not any(Path(f"/proc/{child}").exists() for child in below)


def test_stop_ends_the_launcher_with_success(pod: Any) -> None:
    pod.signal("pause")
    pod.control.post("/v1/stop")
    assert pod.process.wait(30) == 0


def test_the_desired_state_is_reached_before_the_pod_is_ready(
    start_pod: Callable[..., Any], tiny_checkpoint: Path, tiny_pod: Any
) -> None:
    pod = start_pod("--model", str(tiny_checkpoint), *FLAGS, MEGATRON_LIFECYCLE="Suspended")
    pod.wait_for(lambda state: state["ready"] and state["engineState"] == "SUSPENDED")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, pod)
        assert waits(pod, answer)
        pod.signal("resume")
        pod.signal("unpause")
        assert answer.result(30) == ask(tiny_pod)
