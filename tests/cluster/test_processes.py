"""Processes of the tests end with the tests in all cases."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_support.cluster import wait_until
from cluster_support.errors import CommandFailedError
from cluster_support.processes import GuardedProcess, run_guarded

from megatron_operator.local.processes import is_running

# Two processes that ignore SIGTERM: the command of the guard, and its child.
STUBBORN = "trap '' TERM; sh -c 'echo $$ > child; while :; do sleep 1; done' & echo $$ > parent; wait; wait"
STARTER = """
    import pathlib, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent process may ignore interrupts
    sys.path.append(sys.argv[1])
    from cluster_support.processes import GuardedProcess
    process = GuardedProcess(["sh", "-c", sys.argv[2]], pathlib.Path("log"))
    time.sleep(600)
"""


def pids_in(folder: Path) -> list[int]:
    files = [folder / "parent", folder / "child"]
    wait_until(lambda: all(file.exists() and file.read_text().strip() for file in files), "two processes", timeout=10)
    return [int(file.read_text()) for file in files]


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), f"the end of {pids}", timeout=10)


def kill_starter(starter: subprocess.Popen[bytes]) -> None:
    starter.kill()


def interrupt_starter(starter: subprocess.Popen[bytes]) -> None:
    starter.send_signal(signal.SIGINT)


@pytest.mark.parametrize("end", [kill_starter, interrupt_starter])
def test_processes_end_with_the_process_that_started_them(
    tmp_path: Path, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    support = str(Path(__file__).parent)
    command = [sys.executable, "-c", textwrap.dedent(STARTER), support, STUBBORN]
    starter = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    pids = pids_in(tmp_path)
    end(starter)
    starter.wait(10)
    assert_gone(pids)


def test_processes_end_when_their_guard_is_killed(tmp_path: Path) -> None:
    process = GuardedProcess(["sleep", "600"], tmp_path / "log")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: children.read_text() != "", "the guard's child", timeout=10)
    pids = [int(pid) for pid in children.read_text().split()]
    os.kill(process.pid, signal.SIGKILL)
    assert_gone(pids)
    process.stop()


def test_stopping_a_process_ends_its_children_too(tmp_path: Path) -> None:
    process = GuardedProcess(["sh", "-c", STUBBORN], tmp_path / "log", cwd=tmp_path)
    pids = pids_in(tmp_path)
    process.stop(grace=0.2)
    assert_gone(pids)


def test_a_process_with_a_grace_period_may_shut_down(tmp_path: Path) -> None:
    tidy = "trap 'echo tidied up; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    log = tmp_path / "log"
    process = GuardedProcess(["sh", "-c", tidy], log)
    wait_until(lambda: "ready" in log.read_text(), "the trap", timeout=10)
    process.stop(grace=10)
    assert (process.exit_code(), log.read_text().split("\n")[1]) == (7, "tidied up")


def test_a_failed_command_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(CommandFailedError, match=r"exit status 3 from: sh -c .*\n  no room left"):
        run_guarded(["sh", "-c", "echo no room left; exit 3"], tmp_path / "log")
