"""Processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_operator.local.processes import descendants, group_is_alive, is_alive, is_running

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """A process with a child, in a separate session; both end when their input does."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


def test_descendants_include_children_of_children(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    below = descendants(os.getpid())
    assert {parent.pid, child} <= {process.pid for process in below}
    assert [process.pid for process in descendants(parent.pid)] == [child]
    assert all(is_running(pid) and group_is_alive(parent.pid) for pid in (parent.pid, child))


def test_a_zombie_is_not_alive(parent: subprocess.Popen[str]) -> None:
    (process,) = [each for each in descendants(os.getpid()) if each.pid == parent.pid]
    assert is_alive(process)
    parent.kill()
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process)
    assert not is_running(parent.pid)
    assert process not in descendants(os.getpid())


def test_a_process_with_a_reused_pid_is_a_different_process(parent: subprocess.Popen[str]) -> None:
    (process,) = [each for each in descendants(os.getpid()) if each.pid == parent.pid]
    assert not is_alive(replace(process, started=process.started + 1))
