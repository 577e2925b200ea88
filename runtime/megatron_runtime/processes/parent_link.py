"""The child's side of its link to the launcher: options, reports, and its end when the parent ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

from megatron_runtime.processes.log_format import configure_logging

PR_SET_PDEATHSIG = 1

BEAT_SECONDS = 1.0
"""Interval of heartbeats."""
LONGEST_READ = 4096

EXIT_DRAINED = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
"""Exit code for invalid input: a restart with the same input would fail again."""


class ParentLink:
    """The first object that a child's ``main`` creates; see ``Child.start`` for the parent's side."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._parent_pid = int(options.pop("parent_pid"))
        self._report_fd = int(options.pop("report_fd"))
        os.set_inheritable(self._report_fd, False)
        self._last_beat = 0.0
        self._parents_silence: float | None = None
        self._last_listened = 0.0
        self.options = options
        """The options of the ``ChildTask``."""

    @classmethod
    def from_arguments(cls, arguments: list[str] | None = None) -> ParentLink:
        """Read the options, request SIGKILL at the end of the parent, and configure logging."""
        options = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
        level = options.pop("log_level")
        configure_logging(level)
        link = cls(options)
        link.take_death_of_parent_as(signal.SIGKILL)
        return link

    def receive_options(self) -> None:
        """Wait for the options that the ``ChildTask`` sends ``later``, and add them to the others.

        Ends the process if the parent closes standard input without sending them.
        """
        line = sys.stdin.readline()
        if not line:
            sys.exit(EXIT_FAILURE)
        self.options |= json.loads(line)

    def close(self) -> None:
        """End the reports."""
        os.close(self._report_fd)

    def take_death_of_parent_as(self, number: signal.Signals) -> None:
        """Request this signal at the end of the parent. Other signals than SIGKILL let a child write its last data."""
        die_with_parent(self._parent_pid, number)

    def report(self, **fields: Any) -> None:
        """Send one report. Does nothing if the parent has ended."""
        line = json.dumps(fields).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            os.write(self._report_fd, line)

    def beat(self) -> None:
        """Send a heartbeat, unless the last one is recent. After the first, a child without heartbeats counts as
        hanging.

        Call it from the loop that does the work, so that heartbeats stop when the work does.
        """
        now = time.monotonic()
        if now - self._last_beat < BEAT_SECONDS / 2:
            return
        self._last_beat = now
        # A stopped parent does not read: a full pipe must not block this child.
        if select.select([], [self._report_fd], [], 0)[1]:
            self.report(beat=True)

    def parents_silence(self) -> float:
        """Seconds since the last heartbeat of a parent that sends heartbeats. Call it about as often as they are sent.

        Each call adds at most one interval, so that a child that was stopped itself does not consider its parent hung.
        """
        now = time.monotonic()
        if select.select([sys.stdin], [], [], 0)[0] and os.read(sys.stdin.fileno(), LONGEST_READ):
            self._parents_silence = 0.0
        elif self._parents_silence is not None:
            self._parents_silence += min(now - self._last_listened, BEAT_SECONDS)
        self._last_listened = now
        return self._parents_silence or 0.0

    async def keep_beating(self) -> None:
        """Send heartbeats from the running event loop until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_SECONDS)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Let the kernel send this signal when the parent ends (Linux). Exits if the parent has ended already."""
    if sys.platform == "linux":
        set_process_attribute("PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, number)
    # A parent that ended before the call above would never trigger the signal.
    if os.getppid() != parent_pid:
        sys.exit(EXIT_FAILURE)


def set_process_attribute(name: str, number: int, value: int) -> None:
    """Call prctl(2) for this process (Linux). Raises OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(number, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({name}) failed")
