"""Children that send no heartbeats: whether they hang depends on what their threads do."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runtime_support.pod import wait_until

from megatron_runtime.processes.child import ChildTask
from megatron_runtime.processes.hang_detection import Silence, SilenceLimits, is_blocked
from megatron_runtime.processes.supervisor import RestartBudget, Supervisor

LIMITS = SilenceLimits(8.0, 4.0)
BUSY = "while True: pass"
BUSY_IN_A_THREAD = f"import threading; threading.Thread(target=exec, args=[{BUSY!r}]).start(); threading.Event().wait()"
ASLEEP = "import time; time.sleep(100)"
DEADLOCKED = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
PROGRAM = """
from megatron_runtime.processes.parent_link import ParentLink
link = ParentLink.from_arguments()
link.beat()
exec(link.options["then"])
"""


@contextmanager
def running(program: str) -> Iterator[int]:
    """The process id of the program, which has begun."""
    program = f"print(flush=True)\n{program}"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def stays(state: bool, pid: int) -> bool:
    """Whether the process gets into this state, and stays there for a second."""
    wait_until(lambda: is_blocked(pid) == state, f"the process is {'not ' * state}blocked", seconds=30)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        if is_blocked(pid) != state:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("program", [BUSY, BUSY_IN_A_THREAD])
def test_a_process_that_computes_is_not_blocked_until_it_is_stopped(program: str) -> None:
    with running(program) as pid:
        assert stays(False, pid)
        os.kill(pid, signal.SIGSTOP)
        assert stays(True, pid)


@pytest.mark.parametrize("program", [ASLEEP, DEADLOCKED])
def test_a_process_that_waits_is_blocked(program: str) -> None:
    with running(program) as pid:
        assert stays(True, pid)


def test_a_process_that_has_ended_is_not_blocked() -> None:
    with running("pass") as pid:
        pass
    assert not is_blocked(pid)


@pytest.mark.parametrize(
    ("states", "seconds"),
    [
        ([True] * 3, None),
        ([True] * 4, 4.0),
        ([False] * 4 + [True] * 3, None),
        ([True] * 3 + [False] + [True] * 3, None),
        ([False] * 3 + [True] * 4, 4.0),
        ([False] * 7, None),
        ([False] * 8, 8.0),
        ([True, True, True, False] * 2, 8.0),
    ],
)
def test_a_blocked_process_has_less_time(states: list[bool], seconds: float | None) -> None:
    """Each state lasts for a second; True is blocked."""
    silence = Silence()
    for state in states:
        silence.add(1.0, blocked=state)
    found = silence.beyond(LIMITS)
    assert (None if found is None else found[0]) == seconds
    silence.end()
    assert silence.beyond(LIMITS) is None


@pytest.fixture
def run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs a child that does this after its first heartbeat, and returns the message of its end."""
    (tmp_path / "silent_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def run(then: str) -> str:
        child = Supervisor(
            lambda: ChildTask(role="dummy", module="silent_child", options={"then": then}),
            RestartBudget(0),
            hang_timeout=4.0,
            blocked_timeout=2.0,
            log=io.StringIO(),
        )
        return asyncio.run(asyncio.wait_for(child.run(), 60)).message

    return run


def test_a_child_with_a_deadlock_is_killed_earlier(run_once: Callable[[str], str]) -> None:
    assert run_once(DEADLOCKED) == "dummy sent no heartbeat for 2 s and was killed: all its threads were blocked"


def test_a_child_that_computes_has_the_whole_time(run_once: Callable[[str], str]) -> None:
    assert run_once(BUSY) == "dummy sent no heartbeat for 4 s and was killed"
