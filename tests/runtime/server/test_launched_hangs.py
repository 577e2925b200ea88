"""Requests when a process of the pod hangs, or is killed with its connections."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime_support.processes import is_alive
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

REPLICAS = 2


def ask(pod: Any) -> str:
    """A long greedy answer; the request is repeated when its frontend is killed."""
    patient = pod.openai.with_options(max_retries=20)
    return str(
        patient.completions.create(
            model="chat", prompt=[1, 2, 3], temperature=0, max_tokens=400, extra_body={"ignore_eos": True}
        )
        .choices[0]
        .text
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_requests_of_a_killed_frontend_leave_the_engine_and_free_its_blocks(
    start_pod: Callable[..., Any], checkpoint: Path
) -> None:
    flags = ["--model", str(checkpoint), "--kv-cache-memory", "32Mi", "--frontend-replicas", "1"]
    pod = start_pod(*flags, "--no-prefix-caching", "--max-restarts", "0").wait_ready()
    long = {"model": "chat", "prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 128}
    with pod.http.stream("POST", "/v1/completions", json=long) as answer:
        lines = answer.iter_lines()
        next(lines)
        pod.signal("pause")  # so that no request finishes
        pod.wait_for(lambda state: state["requests"]["running"] > 0)
        os.kill(pod.child("server.frontend"), signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    pod.wait_for(lambda state: state["requests"] == {"running": 0, "waiting": 0}, seconds=10)
    unused = 'megatron_kv_blocks{replica_group="0",state="used"} 0.0'
    pod.wait_for(lambda _: unused in pod.control.get("/metrics").text, seconds=10)
    pod.signal("unpause")
    assert ask(pod)


def test_blocked_processes_are_replaced_earlier(start_pod: Callable[..., Any], checkpoint: Path) -> None:
    pod = start_pod("--model", str(checkpoint), "--kv-cache-memory", "32Mi").wait_ready()
    whole = ask(pod)
    for role, victim in {"coordinator": "coordinator_process", "rank 0": "megatron_runtime.rank"}.items():
        os.kill(pod.child(victim), signal.SIGSTOP)
        assert ask(pod) == whole
        hang = f"{role} sent no heartbeat for 4 s and was killed: all its threads were blocked"
        assert hang in pod.log.read_text()


@pytest.fixture(scope="module")
def watched_pod(pod_type: type[Any], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pod that replaces processes that hang for three seconds."""
    flags = ["--model", str(checkpoint), "--kv-cache-memory", "32Mi", "--hang-timeout", "3"]
    pod = pod_type(tmp_path_factory.mktemp("pod"), *flags, "--replica-groups", str(REPLICAS))
    yield pod
    pod.end()


@pytest.mark.parametrize("victim", ["server.frontend", "coordinator_process", "megatron_runtime.rank"])
def test_a_hanging_process_is_replaced(watched_pod: Any, victim: str) -> None:
    pod = watched_pod
    pod.wait_for(lambda state: state["ready"] and len(state["replicaGroups"]) == REPLICAS)
    whole, restarts, words = ask(pod), pod.state()["restarts"], pod.log.read_text()
    stopped = pod.child(victim)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, pod) for _ in range(8)]
        os.kill(stopped, signal.SIGSTOP)
        assert [answer.result(60) for answer in answers] == [whole] * 8
    pod.wait_for(
        lambda state: (
            state["restarts"] == restarts + 1
            and state["ready"]
            and len(state["replicaGroups"]) == REPLICAS
            and len(pod.children()) == REPLICAS + 5
        )
    )
    assert not is_alive(stopped)
    assert "sent no heartbeat for 3 s and was killed" in pod.log.read_text().removeprefix(words)
    assert ask(pod) == whole
