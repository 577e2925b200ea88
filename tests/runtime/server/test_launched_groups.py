"""Several replica groups: in one standalone launcher, and in several pods with a leader."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

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


@pytest.mark.model
def test_a_standalone_service_needs_only_a_model(smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_runtime.cli", "--model", str(smollm2_path), "--replica-groups", "2"]
    command += ["--dtype", "float32"]
    flags = ["--kv-cache-memory", "128Mi", "--threads-per-rank", "1", "--frontend-replicas", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_")}
    with subprocess.Popen([*command, *flags], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("token of the control API ")
            line = process.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)
            assert line.startswith("curl ")
            assert url is not None
            body = {"model": smollm2_path.stem, "messages": FRANCE, "temperature": 0, "max_tokens": 20}
            answer = httpx.post(f"{url[0]}/chat/completions", json=body, timeout=60, trust_env=False).json()
            assert "Paris" in answer["choices"][0]["message"]["content"]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_api_keys_from_a_file_are_required_and_reloaded(
    start_pod: Callable[..., Any], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# people\nfirst-key\n")
    pod = start_pod("--model", str(tiny_checkpoint), *FLAGS, MEGATRON_API_KEYS_FILE=str(keys)).wait_ready()

    def status(key: str) -> int:
        return int(pod.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code)

    refused = pod.http.get("/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (status("first-key"), status("second-key")) == (200, 401)
    time.sleep(0.01)  # so that the file's modification time changes
    keys.write_text("second-key\n")
    assert (status("first-key"), status("second-key")) == (401, 200)
    assert pod.http.get("/health").status_code == 200
