"""Recovery of a pod from failures, and its exit when it can't recover."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model

StartPod = Callable[..., Any]
LONG = 1000
"""Tokens of an answer that is unfinished when a test kills a process."""


def count(pod: Any, length: int = 10) -> str:
    """A greedy answer of this many tokens."""
    answer = pod.openai.completions.create(
        model="chat", prompt="One, two, three,", temperature=0, max_tokens=length, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].text)


@pytest.mark.parametrize("victim", ["coordinator_process", "megatron_runtime.rank"])
def test_a_request_survives_a_killed_process(tiny_pod: Any, victim: str) -> None:
    whole = count(tiny_pod, LONG)
    restarts = tiny_pod.state()["restarts"]
    with ThreadPoolExecutor() as pool:
        (answer,) = tiny_pod.begin(pool, [partial(count, tiny_pod, LONG)])
        os.kill(tiny_pod.child(victim), signal.SIGKILL)
        assert answer.result(60) == whole
    tiny_pod.wait_for(lambda state: state["ready"] and state["restarts"] == restarts + 1)


def test_a_killed_frontend_is_replaced(tiny_pod: Any) -> None:
    victim = tiny_pod.child("server.frontend")
    restarts = tiny_pod.state()["restarts"]
    os.kill(victim, signal.SIGKILL)
    tiny_pod.wait_for(lambda state: state["restarts"] == restarts + 1)
    frontends = [pid for pid, command in tiny_pod.children().items() if "server.frontend" in command]
    assert victim not in frontends
    assert count(tiny_pod)


def test_processes_are_replaced_whose_fork_servers_were_killed(tiny_pod: Any) -> None:
    whole, restarts = count(tiny_pod, LONG), tiny_pod.state()["restarts"]
    with ThreadPoolExecutor() as pool:
        (answer,) = tiny_pod.begin(pool, [partial(count, tiny_pod, LONG)])
        for victim in (*tiny_pod.processes("fork_server_process"), tiny_pod.child("megatron_runtime.rank")):
            os.kill(victim, signal.SIGKILL)
        assert answer.result(60) == whole
    os.kill(tiny_pod.child("server.frontend"), signal.SIGKILL)
    tiny_pod.wait_for(
        lambda state: state["restarts"] == restarts + 2 and len(tiny_pod.processes("server.frontend")) == 2
    )
    assert count(tiny_pod)
    assert len(tiny_pod.processes("fork_server_process")) == 2


def test_a_paused_service_stays_paused_when_its_coordinator_is_replaced(tiny_pod: Any) -> None:
    tiny_pod.signal("pause")
    restarts = tiny_pod.state()["restarts"]
    os.kill(tiny_pod.child("coordinator_process"), signal.SIGKILL)
    tiny_pod.wait_for(
        lambda state: state["restarts"] > restarts and state["ready"] and state["engineState"] == "PAUSED"
    )
    assert tiny_pod.signal("unpause").json()["engineState"] == "RUNNING"
    assert count(tiny_pod)


def test_a_pod_without_its_coordinator_is_not_ready(tiny_pod: Any) -> None:
    before = after = tiny_pod.wait_for(lambda state: state["ready"])
    os.kill(tiny_pod.child("coordinator_process"), signal.SIGKILL)
    while after["restarts"] == before["restarts"]:
        after = tiny_pod.control.get("/v1/state", params={"after": after["revision"]}).json()
    assert (after["ready"], after["engineState"]) == (False, None)
    tiny_pod.wait_for(lambda state: state["ready"])


def test_a_rank_that_fails_repeatedly_ends_the_launcher(start_pod: StartPod, tiny_checkpoint: Path) -> None:
    flags = ("--kv-cache-memory", "32Mi", "--frontend-replicas", "1", "--max-restarts", "0")
    pod = start_pod("--model", str(tiny_checkpoint), *flags).wait_ready()
    os.kill(pod.child("megatron_runtime.rank"), signal.SIGKILL)
    assert pod.process.wait(30) == 1
    reason = json.loads(pod.termination_log.read_text())
    assert (reason["reason"], reason["rank"], reason["exitCode"]) == ("RankFailed", 0, -signal.SIGKILL)
    assert "SIGKILL" in reason["message"]


def test_no_process_survives_a_killed_launcher(start_pod: StartPod, tiny_checkpoint: Path) -> None:
    pod = start_pod("--model", str(tiny_checkpoint), "--kv-cache-memory", "32Mi").wait_ready()
    assert len(pod.children()) == 6
    pod.end()  # by SIGKILL, and checks for remaining processes


def refused(pod: Any, reason: str) -> str:
    """The message of a launcher that ended because of invalid input."""
    assert pod.process.wait(60) == 2
    written = json.loads(pod.termination_log.read_text())
    assert written["reason"] == reason
    assert written["message"].splitlines()[0] in pod.words()
    return str(written["message"])


def test_a_missing_key_file_is_refused(start_pod: StartPod, tiny_checkpoint: Path) -> None:
    pod = start_pod(
        "--model", str(tiny_checkpoint), "--kv-cache-memory", "32Mi", MEGATRON_API_KEYS_FILE="/nowhere/keys"
    )
    assert refused(pod, "InvalidSpec") == "--api-keys-file /nowhere/keys: can't be read: No such file or directory"


def test_a_missing_path_is_refused(start_pod: StartPod) -> None:
    message = refused(start_pod("--model", "/nowhere/model.gguf"), "InvalidSpec")
    assert message.startswith("--model /nowhere/model.gguf: no such file or folder")


def test_a_truncated_checkpoint_is_refused(start_pod: StartPod, smollm2_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2_path.read_bytes()[: 2**20])
    pod = start_pod("--model", str(broken))
    assert f"--model {broken}" in refused(pod, "CheckpointError")
    assert "[rank" not in pod.log.read_text()  # it was started already, and ended without output


def test_a_file_that_is_not_a_checkpoint_is_refused(start_pod: StartPod, tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    shutil.copy(__file__, other)
    assert str(other) in refused(start_pod("--model", str(other)), "CheckpointError")


def test_too_little_memory_is_refused(start_pod: StartPod, smollm2_path: Path) -> None:
    pod = start_pod("--model", str(smollm2_path), "--dtype", "float32", "--kv-cache-memory", "900Gi")
    message = refused(pod, "InvalidSpec")
    assert message.startswith("--kv-cache-memory 900Gi: with 621.1Mi of weights")  # the tied head is stored twice
    assert "use a smaller cache" in message


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("tensor", 2, "the model has 9 attention heads on 3 key/value heads, .*; use one of 1, 3, 9$"),
        ("pipeline", 31, "the model has 30 layers; use 30 or less$"),
        ("expert", 2, "the model has no experts; use 1$"),
    ],
)
def test_a_number_of_ranks_that_can_not_divide_the_model_is_refused(
    start_pod: StartPod, smollm2_path: Path, name: str, size: int, words: str
) -> None:
    flag = f"--{name}-parallel"
    message = refused(start_pod("--model", str(smollm2_path), flag, str(size)), "InvalidSpec")
    assert re.match(f"{flag}: {name} parallel size is {size}, but {words}", message), message


def test_a_port_in_use_is_refused(start_pod: StartPod, smollm2_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        pod = start_pod("--model", str(smollm2_path), "--host", "127.0.0.1", "--port", str(port))
        assert f"--port {port}: already in use on 127.0.0.1" in refused(pod, "InvalidSpec")


def test_check_describes_the_service_and_starts_nothing(smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_runtime.cli", "--model", str(smollm2_path), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "134515008 parameters" in done.stdout
    assert "no problems found" in done.stdout
