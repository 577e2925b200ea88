"""Children of the launcher: their reports, restarts and ends."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runtime_support.processes import is_alive

from megatron_runtime.processes.child import Child, ChildTask
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_FAILURE
from megatron_runtime.processes.replica_group_supervisor import ReplicaGroupSupervisor
from megatron_runtime.processes.supervisor import ChildEnd, RestartBudget, Restarter, Supervisor

PROGRAM = """
import os, pathlib, signal, sys, time
from megatron_runtime.processes.parent_link import ParentLink
link = ParentLink.from_arguments()
print("hello from", link.options["name"])
print("x" * 200000)
link.report(phase="Serving", pid=os.getpid())
act = link.options["act"]
if act == "wait":
    time.sleep(60)
if act == "hang":
    link.beat()
    os.kill(os.getpid(), signal.SIGSTOP)
if act == "hang at its start":
    os.kill(os.getpid(), signal.SIGSTOP)
if act == "hang at every second start":
    other = pathlib.Path(link.options["file"])
    if other.exists():
        other.unlink()
        link.beat()
    else:
        other.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
if act == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link.report(phase="Deaf")
    time.sleep(60)
if act == "listen":
    while link.parents_silence() < 2:
        time.sleep(0.05)
    pathlib.Path(link.options["file"]).touch()
if act == "refuse":
    link.report(error={"reason": "CheckpointError", "message": "the file is broken"})
if act == "refuse slowly":
    link.report(error={"reason": "ConfigurationError", "message": "too little memory"})
    pathlib.Path(link.options["file"]).touch()
    time.sleep(1)
if act == "lose the other":
    while not pathlib.Path(link.options["file"]).exists():
        time.sleep(0.01)
    link.report(error={"reason": "LostRankError", "message": "rank 1 is missing"})
sys.exit(link.options.get("code", 0))
"""

PARENT = """
import asyncio, sys
from megatron_runtime.processes.child import Child, ChildTask

def show(report):
    print(report["pid"], flush=True)

async def main():
    options = {"name": "orphan", "act": sys.argv[1], "file": sys.argv[2]}
    child = Child(ChildTask("dummy", "dummy_child", options, gets_beats=True), show)
    await child.start()
    await child.wait()

asyncio.run(main())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that children can run."""
    (tmp_path / "dummy_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "dummy_child"


def task(program: str, act: str, **options: Any) -> ChildTask:
    """A child that follows its options."""
    return ChildTask(role="dummy", module=program, options={"name": "the child", "act": act, **options})


class Reports:
    """Collects reports, and can be waited on."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._news = asyncio.Event()

    def __call__(self, report: Any) -> None:
        self.all.append(report)
        self._news.set()

    async def phase(self, name: str, times: int = 1) -> int:
        """The pid in the report, once this phase was reported this number of times."""
        async with asyncio.timeout(30):
            while sum(report.get("phase") == name for report in self.all) < times:
                self._news.clear()
                await self._news.wait()
        return int(next(report.get("pid", 0) for report in reversed(self.all) if report.get("phase") == name))


async def test_output_is_marked_with_the_role_and_its_end_is_kept(program: str) -> None:
    log = io.StringIO()
    child = Child(task(program, "end", code=3), log=log)
    await child.start()
    assert await child.wait() == 3
    lines = log.getvalue().splitlines()
    assert lines[0] == "[dummy] hello from the child"
    assert all(line.startswith("[dummy] ") for line in lines)
    assert sum(len(line.removeprefix("[dummy] ")) for line in lines[1:]) == 200000
    assert child.tail[0] == "hello from the child"


async def test_a_child_is_started_again_until_the_budget_is_spent(program: str) -> None:
    reports, budget = Reports(), RestartBudget(2)
    supervisor = Supervisor(lambda: task(program, "end", code=7), budget, on_report=reports, log=io.StringIO())
    end = await asyncio.wait_for(supervisor.run(), 60)
    assert end.exit_code == 7
    assert (supervisor.restarts, budget.used) == (2, 2)
    assert len(reports.all) == 3
    assert "exit code 7" in end.message


async def test_invalid_input_is_not_retried(program: str) -> None:
    supervisor = Supervisor(lambda: task(program, "refuse", code=2), log=io.StringIO())
    end = await asyncio.wait_for(supervisor.run(), 30)
    assert end.is_bad_input
    assert end.message == "the file is broken"
    assert supervisor.restarts == 0


async def test_a_killed_child_is_replaced(program: str) -> None:
    reports = Reports()
    supervisor = Supervisor(lambda: task(program, "wait"), on_report=reports, log=io.StringIO())
    run = asyncio.create_task(supervisor.run())
    os.kill(await reports.phase("Serving"), signal.SIGKILL)
    await reports.phase("Serving", times=2)
    await supervisor.stop(10)
    assert (await run).exit_code == -signal.SIGTERM


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(program: str) -> None:
    reports = Reports()
    child = Child(task(program, "stubborn"), reports, io.StringIO())
    await child.start()
    await reports.phase("Deaf")
    assert await child.stop(0.2) == -signal.SIGKILL


async def test_a_cancelled_supervisor_leaves_no_child(program: str) -> None:
    reports = Reports()
    supervisor = Supervisor(lambda: task(program, "wait"), on_report=reports, log=io.StringIO())
    run = asyncio.create_task(supervisor.run())
    pid = await reports.phase("Serving")
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("program")
def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    parent = tmp_path / "parent.py"
    parent.write_text(PARENT)
    command = [sys.executable, parent, "wait", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 10
    while is_alive(orphan):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.02)


@pytest.mark.usefixtures("program")
def test_a_child_detects_a_hanging_parent_and_ignores_its_own_pauses(tmp_path: Path) -> None:
    parent, noticed = tmp_path / "parent.py", tmp_path / "noticed"
    parent.write_text(PARENT)
    command = [sys.executable, parent, "listen", str(noticed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        time.sleep(1.5)  # so that the first heartbeat has arrived
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in (process.pid, child):
                os.kill(pid, number)
            time.sleep(3)
        assert not noticed.exists()
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not noticed.exists():
            assert time.monotonic() < deadline, "the child goes on without its parent"
            time.sleep(0.05)
        process.kill()


async def test_a_child_that_falls_silent_is_killed_and_started_again(program: str) -> None:
    reports = Reports()
    supervisor = Supervisor(
        lambda: task(program, "hang"), RestartBudget(1), hang_timeout=1.0, on_report=reports, log=io.StringIO()
    )
    end = await asyncio.wait_for(supervisor.run(), 60)
    assert (supervisor.restarts, end.exit_code) == (1, -signal.SIGKILL)
    assert end.message == "dummy sent no heartbeat for 1 s and was killed"
    assert end.seconds_served > 0
    assert [report.get("phase") for report in reports.all] == ["Serving"] * 2


async def test_a_child_that_starts_is_not_considered_hung(program: str) -> None:
    reports = Reports()
    supervisor = Supervisor(lambda: task(program, "wait"), hang_timeout=0.0, on_report=reports, log=io.StringIO())
    life = asyncio.create_task(supervisor.run())
    await reports.phase("Serving")
    done, _ = await asyncio.wait({life}, timeout=2.5)
    assert not done
    await supervisor.stop(5)
    end = await life
    assert (end.exit_code, end.seconds_served) == (-signal.SIGTERM, 0.0)


async def test_a_child_that_hangs_at_its_start_is_replaced_and_the_next_one_has_more_time(program: str) -> None:
    supervisor = Supervisor(
        lambda: task(program, "hang at its start"), RestartBudget(1), start_timeout=0.3, log=io.StringIO()
    )
    end = await asyncio.wait_for(supervisor.run(), 60)
    assert (supervisor.restarts, end.exit_code, end.seconds_served) == (1, -signal.SIGKILL, 0.0)
    # The first of all has 0.9 s.
    assert end.message == "dummy sent no heartbeat for 1.8 s after its start and was killed"


async def test_a_child_that_starts_in_time_gives_the_next_one_the_usual_time(program: str, tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.touch()
    supervisor = Supervisor(
        lambda: task(program, "hang at every second start", file=str(file)),
        RestartBudget(1),
        start_timeout=5.0,
        log=io.StringIO(),
    )
    end = await asyncio.wait_for(supervisor.run(), 60)
    assert end.message == "dummy sent no heartbeat for 5 s after its start and was killed"


class Failing(Restarter):
    """Ends again and again after it has served for these times, and records the delays of its restarts."""

    def __init__(self, *served: float) -> None:
        super().__init__(RestartBudget(len(served)), restart_success=True, on_change=lambda: None)
        self._served = iter([*served, 0.0])
        self.delays: list[float] = []

    async def _live_once(self) -> ChildEnd:
        return ChildEnd("dummy", 1, seconds_served=next(self._served))

    async def _stopped_within(self, seconds: float) -> bool:
        self.delays.append(seconds)
        return False


async def test_delays_grow_only_while_a_child_fails_before_it_has_served() -> None:
    failing = Failing(0, 0, 1, 0, 0, 0, 0, 0, 6, 0, 3600, 6)
    await failing.run()
    assert failing.delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 0.2, 0.4, 0.2, 0.2]


async def test_the_ranks_of_a_replica_end_together_and_start_again_together(program: str) -> None:
    pids: dict[int, list[int]] = {0: [], 1: []}
    serving = asyncio.Condition()

    def hear(place: int, report: Any) -> None:
        pids[place].append(report["pid"])
        notices.append(asyncio.create_task(notify()))

    async def notify() -> None:
        async with serving:
            serving.notify_all()

    async def starts(count: int) -> None:
        async with asyncio.timeout(30), serving:
            await serving.wait_for(lambda: all(len(seen) == count for seen in pids.values()))

    notices: list[asyncio.Task[None]] = []
    supervisor = ReplicaGroupSupervisor(
        lambda: [task(program, "wait"), task(program, "wait")], RestartBudget(1), on_report=hear, log=io.StringIO()
    )
    run = asyncio.create_task(supervisor.run())
    await starts(1)
    os.kill(pids[0][0], signal.SIGKILL)
    await starts(2)
    assert not is_alive(pids[1][0])
    assert all(supervisor.is_alive(place) for place in (0, 1))
    os.kill(pids[1][1], signal.SIGKILL)
    end = await asyncio.wait_for(run, 30)
    assert (supervisor.restarts, supervisor.culprit, end.exit_code) == (1, 1, -signal.SIGKILL)
    assert "hello from the child" in end.message
    assert not is_alive(pids[0][1])


async def test_a_rank_that_exits_with_zero_does_not_stop_the_others(program: str) -> None:
    tasks = [task(program, "end"), task(program, "end", code=5)]
    for order in (tasks, tasks[::-1]):
        supervisor = ReplicaGroupSupervisor(lambda order=order: order, RestartBudget(0), log=io.StringIO())  # type: ignore[misc]
        end = await asyncio.wait_for(supervisor.run(), 30)
        assert (end.exit_code, order[supervisor.culprit]) == (5, tasks[1])


async def test_a_rank_whose_error_another_rank_notices_before_it_ends_is_the_cause(
    program: str, tmp_path: Path
) -> None:
    """A rank on a GPU has closed its connections some time before its process has ended."""
    file = str(tmp_path / "connection closed")
    tasks = [
        task(program, "lose the other", file=file, code=EXIT_FAILURE),
        task(program, "refuse slowly", file=file, code=EXIT_BAD_INPUT),
    ]
    supervisor = ReplicaGroupSupervisor(lambda: tasks, RestartBudget(1), log=io.StringIO())
    end = await asyncio.wait_for(supervisor.run(), 30)
    assert (supervisor.restarts, supervisor.culprit, end.message) == (0, 1, "too little memory")


def test_the_restart_budget_is_restored_after_a_time_without_restarts() -> None:
    now = 0.0
    budget = RestartBudget(2, reset_after=10.0, clock=lambda: now)
    for _ in range(2):
        assert budget.can_restart()
        budget.take()
    now = 9.9
    assert not budget.can_restart()
    for day in range(1, 100):
        now = day * 24.0
        assert budget.can_restart()
        budget.take()
    budget.take()
    assert not budget.can_restart()
