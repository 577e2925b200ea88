"""Children that are forked by a process that has imported their modules."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_support.processes import children_of, is_alive

from megatron_runtime.processes.child import Child, ChildTask
from megatron_runtime.processes.fork_server import ForkServer, adopt_orphans
from megatron_runtime.processes.parent_link import EXIT_FAILURE
from megatron_runtime.processes.supervisor import Supervisor

CHILD = """
import json, os, signal, subprocess, sys, time
from megatron_runtime.processes.parent_link import ParentLink

IMPORTED_BY = os.getpid()
PRELOADED_BY = None
WAS_SET = os.environ.get("OF_THE_SERVER")

def preload():
    global PRELOADED_BY
    PRELOADED_BY = os.getpid()
    if "PRELOAD_SECONDS" in os.environ:
        time.sleep(float(os.environ["PRELOAD_SECONDS"]))

def main():
    link = ParentLink.from_arguments()
    options = link.options
    if options.get("later"):
        link.receive_options()
    print("hello from", options["name"])
    print("an error", file=sys.stderr)
    with open(options["shared_fd"], closefd=False) as shared:
        text = shared.read()
    link.report(
        imported_by=IMPORTED_BY, preloaded_by=PRELOADED_BY, was_set=WAS_SET, pid=os.getpid(), parent=os.getppid(),
        group=os.getpgid(0), own=os.environ["OF_THE_CHILD"], role=os.environ["MEGATRON_LOG_PROCESS"], shared=text,
        descriptors=sorted(int(each) for each in os.listdir("/proc/self/fd")), arguments=len(sys.argv),
        more=options.get("more"), command=open("/proc/self/cmdline").read(),
    )
    if options.get("act") == "wait":
        time.sleep(60)
    if options.get("act") == "leave a process":
        print(subprocess.Popen(["sleep", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
    if options.get("act") == "raise":
        raise ValueError("an unexpected value")
    sys.exit(options.get("code", 0))
"""

PARENT = """
import asyncio, sys
from megatron_runtime.processes.child import Child, ChildTask
from megatron_runtime.processes.fork_server import ForkServer

async def main():
    server = ForkServer("fork server", "forked_child", {})
    options = {"name": "orphan", "act": "wait"}
    with open("/dev/null") as nothing:
        task = ChildTask(
            "dummy", "forked_child", options, {"OF_THE_CHILD": "1"}, {"shared_fd": nothing.fileno()}, spawner=server
        )
        child = Child(task, lambda report: print(report["pid"], report["imported_by"], flush=True))
        await child.start()
        await child.wait()

asyncio.run(main())
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that children can run."""
    (tmp_path / "forked_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "forked_child"


@pytest.fixture(autouse=True)
def no_adoption() -> Iterator[None]:
    """Other tests of this process expect that orphans are not moved to it."""
    yield
    adopt_orphans(False)


@pytest.fixture
async def server(program: str) -> AsyncIterator[ForkServer]:
    """A fork server of this module."""
    server = ForkServer("fork server", program, {"OF_THE_SERVER": "yes"}, log=io.StringIO())
    yield server
    await server.close()


class Start:
    """A forked child, with its reports."""

    def __init__(self, server: ForkServer, folder: Path, later: asyncio.Future[Any] | None = None, **options: Any):
        (folder / "shared").write_text("text of an inherited file")
        self.shared = (folder / "shared").open()
        self.log = io.StringIO()
        self.reports: list[Any] = []
        self.reported = asyncio.Event()
        self.task = ChildTask(
            "dummy",
            "forked_child",
            {"name": "the child", "later": later is not None, **options},
            {"OF_THE_CHILD": "also"},
            {"shared_fd": self.shared.fileno()},
            later=later,
            spawner=server,
        )
        self.child = Child(self.task, self._receive, self.log)

    def _receive(self, report: Any) -> None:
        self.reports.append(report)
        self.reported.set()

    async def begin(self) -> Any:
        """Starts it, and returns its report."""
        with self.shared:
            await self.child.start()
        await self.reported.wait()
        return self.reports[0]


def servers() -> list[int]:
    """The fork servers of this process."""
    return [pid for pid, command in children_of(os.getpid()).items() if "fork_server_process" in command]


def exists(pid: str) -> bool:
    """Also of a zombie."""
    return Path("/proc", pid).exists()


async def until(condition: Callable[[], Any]) -> None:
    """Polls the condition."""
    while not condition():  # noqa: ASYNC110  # the kernel reports it to no event loop
        await asyncio.sleep(0.01)


async def test_a_child_is_like_one_with_an_interpreter_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    start = Start(server, tmp_path, code=7)
    report = await start.begin()
    assert await start.child.wait() == 7
    assert not start.child.is_alive
    assert report["imported_by"] == report["preloaded_by"] != report["pid"] == start.child.pid
    assert (report["parent"], report["group"], report["arguments"]) == (os.getpid(), report["pid"], 2)
    assert (report["was_set"], report["own"], report["role"]) == ("yes", "also", "dummy")
    assert report["shared"] == "text of an inherited file"
    assert report["command"].startswith(f"{sys.executable} -u -m forked_child {{"), report["command"]
    assert start.log.getvalue() == "[dummy] hello from the child\n[dummy] an error\n"


async def test_a_child_inherits_only_its_own_descriptors(server: ForkServer, tmp_path: Path) -> None:
    first, second = Start(server, tmp_path, act="wait"), Start(server, tmp_path)
    reports = [await first.begin(), await second.begin()]
    # Of the last three, one is that of the inherited file, one that of the reports, and one that of the folder.
    assert all(len(report["descriptors"]) == 6 for report in reports), reports
    await first.child.kill()


async def test_children_share_a_server_and_get_options_later(server: ForkServer, tmp_path: Path) -> None:
    later = asyncio.get_running_loop().create_future()
    starts = [Start(server, tmp_path, later, name=f"child {number}") for number in range(3)]
    begun = asyncio.gather(*(start.begin() for start in starts))
    later.set_result({"more": "options"})
    reports = await begun
    assert len({report["imported_by"] for report in reports}) == 1
    assert len({report["pid"] for report in reports}) == 3
    assert [report["more"] for report in reports] == ["options"] * 3
    assert [start.child.pid for start in starts] == [report["pid"] for report in reports]


async def test_an_exception_is_in_the_output_and_ends_the_child_alone(server: ForkServer, tmp_path: Path) -> None:
    start = Start(server, tmp_path, act="raise")
    report = await start.begin()
    assert await start.child.wait() == EXIT_FAILURE
    assert start.child.tail[-1] == "ValueError: an unexpected value"
    assert is_alive(report["imported_by"])


async def test_no_process_that_a_child_leaves_stays_a_zombie(server: ForkServer, tmp_path: Path) -> None:
    start = Start(server, tmp_path, act="leave a process")
    await start.begin()
    assert await start.child.wait() == 0
    left = start.child.tail[-1]
    assert exists(left)
    await until(lambda: not exists(left))


async def test_signals_end_a_child(server: ForkServer, tmp_path: Path) -> None:
    start = Start(server, tmp_path, act="wait")
    await start.begin()
    assert await start.child.stop(10) == -signal.SIGTERM
    start.child.send_signal(signal.SIGTERM)  # has no effect


async def test_a_killed_server_is_replaced_and_its_children_continue(server: ForkServer, tmp_path: Path) -> None:
    first, second = Start(server, tmp_path, act="wait"), Start(server, tmp_path)
    before = await first.begin()
    os.kill(before["imported_by"], signal.SIGKILL)
    await until(lambda: not servers())
    after = await second.begin()
    assert after["imported_by"] != before["imported_by"]
    assert first.child.is_alive
    assert await second.child.wait() == 0
    await first.child.kill()


async def test_a_hanging_server_is_killed_and_the_child_started_again(program: str, tmp_path: Path) -> None:
    server = ForkServer("fork server", program, {"OF_THE_SERVER": "yes"}, hang_timeout=1, log=io.StringIO())
    first, second = Start(server, tmp_path), Start(server, tmp_path)
    report = await first.begin()
    os.kill(report["imported_by"], signal.SIGSTOP)
    with second.shared:
        end = await Supervisor(lambda: second.task, restart_success=False, log=io.StringIO()).run()
    assert end.exit_code == 0
    assert not is_alive(report["imported_by"])
    await server.close()


async def test_a_start_that_is_cancelled_leaves_no_process(program: str, tmp_path: Path) -> None:
    server = ForkServer("fork server", program, {"PRELOAD_SECONDS": "0.5"}, log=io.StringIO())
    start = Start(server, tmp_path, act="wait")
    before = set(children_of(os.getpid()))
    starting = asyncio.create_task(start.begin())
    await until(servers)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    other = Start(server, tmp_path)
    await other.begin()
    await other.child.wait()
    assert set(children_of(os.getpid())) - before == set(servers())
    await server.close()
    assert set(children_of(os.getpid())) == before


async def test_a_server_that_was_closed_right_after_its_start_starts_again(server: ForkServer, tmp_path: Path) -> None:
    server.start()
    await server.close()
    start = Start(server, tmp_path)
    await start.begin()
    assert await start.child.wait() == 0


async def test_closing_ends_a_start_at_once(program: str, tmp_path: Path) -> None:
    server = ForkServer("fork server", program, {"PRELOAD_SECONDS": "60"}, log=io.StringIO())
    starting = asyncio.create_task(Start(server, tmp_path).begin())
    await until(servers)
    await server.close()
    with pytest.raises(ChildProcessError, match="the fork server was ended"):
        await starting
    assert not servers()


async def test_a_module_that_fails_to_import_is_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forked_child.py").write_text("import nothing_of_this_name")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = ForkServer("fork server", "forked_child", {}, log=io.StringIO())
    with pytest.raises(ChildProcessError, match=r"ended with exit code 1(.|\n)*nothing_of_this_name"):
        await Start(server, tmp_path).begin()


@pytest.mark.usefixtures("program")
async def test_the_kernel_ends_server_and_children_of_a_killed_launcher() -> None:
    # The environment lies behind the command line in memory, and the child changes its first variable.
    environment = {"OF_THE_CHILD": "changed by the task", **os.environ}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    pids = [int(word) for word in (await parent.stdout.readline()).split()]
    assert "-m forked_child" in children_of(parent.pid)[pids[0]]
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    await parent.wait()
    await until(lambda: not any(is_alive(pid) for pid in pids))
