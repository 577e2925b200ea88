"""A child process of the launcher: start, reports, log and end. The child's side is ``parent_link``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from typing import Any, TextIO

from megatron_runtime.processes.log_format import PROCESS_VARIABLE, relayed
from megatron_runtime.processes.parent_link import BEAT_SECONDS
from megatron_runtime.processes.spawning import INTERPRETERS, ChildProcess, Command, Spawner, pipe

logger = logging.getLogger(__name__)

TAIL_LINES = 40
"""Lines of a child's output that are kept for the message about its end."""
LONGEST_LINE = 64 * 1024

Report = Mapping[str, Any]
ReportHandler = Callable[[Report], None]


def _ignore(_: Report) -> None:
    """For children without reports."""


@dataclass(frozen=True)
class ChildTask:
    """A process to start: ``python -m module`` with options as JSON.

    Attributes:
        descriptors: File descriptors that it inherits, by the names of the options that have their numbers.
        spawner: How it starts.
    """

    role: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    descriptors: Mapping[str, int] = field(default_factory=dict)
    log_level: str = "INFO"
    gets_beats: bool = False
    """Whether the parent sends it heartbeats, see ``ParentLink.parents_silence``."""
    later: asyncio.Future[Mapping[str, Any]] | None = None
    """Options that are not known when the process starts, see ``ParentLink.receive_options``. Excludes ``gets_beats``.
    """
    spawner: Spawner = INTERPRETERS

    def __post_init__(self) -> None:
        assert self.later is None or not self.gets_beats, "standard input is for one of them"


class Child:
    """One running child. The kernel kills it when the thread that called ``start`` ends, so call it from a permanent
    thread.

    Each line of its output is written to ``log`` with the role as a prefix; each reported JSON line is passed to
    ``on_report``. It leads its own process group, so that a Ctrl-C at the terminal reaches only the launcher.
    """

    def __init__(self, task: ChildTask, on_report: ReportHandler = _ignore, log: TextIO | None = None) -> None:
        self.task = task
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_report = on_report
        self._log = log
        self._process: ChildProcess | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._writing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process. Raises OSError if that fails."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            lines, output = pipe()
            reports, report = pipe()
            stdin, words = pipe() if self._writes else (FileIO(os.devnull), None)
            for end in (lines, reports, *([words] if words else [])):
                ours.enter_context(end)
            for end in (output, report, stdin):
                theirs.enter_context(end)
            command = Command(
                module=self.task.module,
                options={**self.task.options, "parent_pid": os.getpid(), "log_level": self.task.log_level},
                descriptors={**self.task.descriptors, "report_fd": report.fileno()},
                environment={PROCESS_VARIABLE: self.task.role, **self.task.environment},
                stdin=stdin.fileno(),
                output=output.fileno(),
            )
            self._process = await self.task.spawner.spawn(command)
            ours.pop_all()
        self._readers = [
            asyncio.create_task(_read_lines(lines, self._log_line)),
            asyncio.create_task(_read_lines(reports, self._deliver)),
        ]
        if words is not None:
            later = self.task.later
            self._writing = asyncio.create_task(_keep_beating(words) if later is None else _send(later, words))
            self._writing.add_done_callback(lambda _: words.close())

    @property
    def _writes(self) -> bool:
        return self.task.gets_beats or self.task.later is not None

    @property
    def pid(self) -> int | None:
        """The process id, or None before ``start``."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Wait for the end of the process and of its output. Returns the exit code; negative for a signal."""
        assert self._process is not None, "wait() needs start()"
        code = await self._process.wait()
        if self._writing is not None:
            self._writing.cancel()
        # A grandchild may keep the pipes open; the output of the child itself has arrived by then.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*self._readers, return_exceptions=True)
        for reader in self._readers:
            reader.cancel()
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.is_alive:
            assert self._process is not None
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace_seconds: float) -> int:
        """Send SIGTERM, and SIGKILL if the process is still alive after the grace period. Returns the exit code."""
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                return await self.wait()
        except TimeoutError:
            logger.warning("%s did not end within %.0f s; killing it", self.task.role, grace_seconds)
        return await self.kill()

    async def kill(self) -> int:
        """Send SIGKILL. Returns the exit code."""
        self.send_signal(signal.SIGKILL)
        return await self.wait()

    def _log_line(self, line: str) -> None:
        self.tail.append(line)
        print(relayed(self.task.role, line), file=self._log or sys.stderr, flush=True)

    def _deliver(self, line: str) -> None:
        try:
            report = json.loads(line)
        except ValueError:
            logger.warning("%s reported something that is not JSON: %.200s", self.task.role, line)
            return
        try:
            self._on_report(report)
        except Exception:
            logger.exception("the report %.200s of %s could not be handled", line, self.task.role)


async def _keep_beating(pipe: FileIO) -> None:
    os.set_blocking(pipe.fileno(), False)  # a child that was stopped reads nothing
    with contextlib.suppress(BrokenPipeError):
        while True:
            pipe.write(b".")
            await asyncio.sleep(BEAT_SECONDS)


async def _send(later: asyncio.Future[Mapping[str, Any]], pipe: FileIO) -> None:
    # Shielded, because several children may wait for the same options and one of them may end.
    options = await asyncio.shield(later)
    with contextlib.suppress(BrokenPipeError):  # The supervisor reports the end of the child.
        pipe.write(json.dumps(dict(options)).encode() + b"\n")


async def _read_lines(pipe: FileIO, receive: Callable[[str], None]) -> None:
    stream = asyncio.StreamReader(limit=LONGEST_LINE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        async for line in _lines(stream):
            receive(line)
    finally:
        transport.close()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines without line ends. A line beyond the reader's limit is split."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as end:
            if end.partial:
                yield end.partial.decode(errors="replace")
            return
        except asyncio.LimitOverrunError as overrun:
            line = await stream.readexactly(max(overrun.consumed, 1))
        yield line.decode(errors="replace").rstrip("\r\n")
