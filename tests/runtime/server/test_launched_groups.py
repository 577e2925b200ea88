"""Several replica groups: in one standalone launcher, and in several pods with a leader."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from runtime_support.one_rank import answer_of_one_rank

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--frontend-replicas", "1")
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def ask(pod: Any) -> str:
    """One short, deterministic answer."""
    answer = pod.openai.chat.completions.create(
        model="chat", messages=FRANCE, temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].message.content)


def test_a_worker_pod_joins_and_leaves_the_leader_without_losing_requests(
    start_pod: Callable[..., Any], tiny_checkpoint: Path
) -> None:
    flags = ("--model", str(tiny_checkpoint), *FLAGS)
    leader = start_pod(*flags).wait_ready()
    alone = ask(leader)
    worker = start_pod(
        *flags,
        MEGATRON_LEADER="0",
        MEGATRON_REPLICA_GROUP="1",
        MEGATRON_COORDINATOR_ADDRESS=f"tcp://{leader.host}:5557",
    )
    state = leader.wait_for(lambda state: len(state["replicaGroups"]) == 2)
    assert [replica["index"] for replica in state["replicaGroups"]] == [0, 1]
    assert worker.wait_for(lambda state: state["ready"])["role"] == "worker"
    assert worker.control.post("/v1/pause").status_code == 409
    assert {ask(leader) for _ in range(4)} == {alone}
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(30) == 0
    leader.wait_for(lambda state: len(state["replicaGroups"]) == 1)
    assert ask(leader) == alone


def test_a_replica_group_restarted_with_the_coordinator_loads_the_weights_of_the_service(
    start_pod: Callable[..., Any], tiny_checkpoint: Path
) -> None:
    pod = start_pod("--model", str(tiny_checkpoint), *FLAGS, "--replica-groups", "2")

    def has_versions(wanted: int) -> Callable[[Any], bool]:
        return lambda state: [replica["weightVersion"] for replica in state["replicaGroups"]] == [wanted] * 2

    pod.wait_for(has_versions(0))
    pod.signal("pause")
    asked = {"wait": "true", "timeout": 60}
    assert pod.control.post("/v1/weights", params=asked, json={"path": str(tiny_checkpoint)}).status_code == 200
    pod.wait_for(has_versions(1))
    pod.signal("unpause")
    restarts = pod.state()["restarts"]
    for victim in ("coordinator_process", "megatron_runtime.rank"):
        os.kill(pod.child(victim), signal.SIGKILL)
    pod.wait_for(lambda state: state["restarts"] == restarts + 2 and has_versions(1)(state) and state["ready"])
    for _ in range(4):
        answer = pod.openai.chat.completions.create(model="chat", messages=FRANCE, temperature=0, max_tokens=20)
        assert answer.system_fingerprint == "weights-1"


def test_a_standalone_service_needs_only_a_model(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "megatron_runtime.cli", "--model", str(tiny_checkpoint), "--replica-groups", "2"]
    command += ["--dtype", "float32"]
    flags = ["--kv-cache-memory", "32Mi", "--threads-per-rank", "1", "--frontend-replicas", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_")}
    with subprocess.Popen([*command, *flags], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("token of the control API ")
            line = process.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)
            assert line.startswith("curl ")
            assert url is not None
            body = {"model": tiny_checkpoint.name, "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 20}
            asked = {**body, "ignore_eos": True}
            answer = httpx.post(f"{url[0]}/completions", json=asked, timeout=60, trust_env=False).json()
            assert answer["choices"][0]["text"] == answer_of_one_rank(tiny_checkpoint, [5, 6, 7], 20)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
