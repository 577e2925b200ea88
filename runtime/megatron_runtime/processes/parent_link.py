"""A child's link to the launcher that started it: its options, its reports, and its death with the parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1

BEAT_SECONDS = 1.0
"""Between two signs of life."""
LONGEST_READ = 4096

EXIT_DRAINED = 0
EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
"""Whoever reads this code need not try again with the same input."""


class ParentLink:
    """Made first thing in a child's ``main``; see ``Child.start`` for the other end."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._parent_pid = int(options.pop("parent_pid"))
        self._report_fd = int(options.pop("report_fd"))
        os.set_inheritable(self._report_fd, False)
        self._last_beat = 0.0
        self._parents_silence: float | None = None
        self._last_listened = 0.0
        self.options = options
        """What the child was asked to do, as the ``ChildTask`` gave it."""

    @classmethod
    def from_arguments(cls, arguments: list[str] | None = None) -> ParentLink:
        """Reads the options, ties this process's life to its parent's, and sets up its log."""
        options = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
        level = options.pop("log_level")
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        link = cls(options)
        link.take_death_of_parent_as(signal.SIGKILL)
        return link

    def receive_options(self) -> None:
        """Waits for the options that came ``later`` (see ``ChildTask``) and adds them to the others.

        Ends the process if the parent closes standard input without a word.
        """
        line = sys.stdin.readline()
        if not line:
            sys.exit(EXIT_FAILURE)
        self.options |= json.loads(line)

    def take_death_of_parent_as(self, number: signal.Signals) -> None:
        """Another signal than SIGKILL is for a child that has something left to write at its end."""
        die_with_parent(self._parent_pid, number)

    def report(self, **fields: Any) -> None:
        """Sends one report. A parent that is gone no longer listens, which is no error here."""
        line = json.dumps(fields).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            os.write(self._report_fd, line)

    def beat(self) -> None:
        """Gives a sign of life, unless the last one is fresh; from the first on, silence means that this child hangs.

        Call it from the loop that does the work, so that it stops when the work does.
        """
        now = time.monotonic()
        if now - self._last_beat < BEAT_SECONDS / 2:
            return
        self._last_beat = now
        # A parent that was stopped reads nothing: that must not stop this child too.
        if select.select([], [self._report_fd], [], 0)[1]:
            self.report(beat=True)

    def parents_silence(self) -> float:
        """For how many seconds a parent that gave signs of life has given none. Ask about as often as it gives them.

        No question adds more than the time between two signs: a process that stood still itself must not blame its
        parent.
        """
        now = time.monotonic()
        if select.select([sys.stdin], [], [], 0)[0] and os.read(sys.stdin.fileno(), LONGEST_READ):
            self._parents_silence = 0.0
        elif self._parents_silence is not None:
            self._parents_silence += min(now - self._last_listened, BEAT_SECONDS)
        self._last_listened = now
        return self._parents_silence or 0.0

    async def keep_beating(self) -> None:
        """Beats from the running event loop until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_SECONDS)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Has the kernel send this signal when the parent ends (Linux). Ends now if the parent is gone already."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        if library.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have ended between our start and the call above, which then would never fire.
    if os.getppid() != parent_pid:
        sys.exit(EXIT_FAILURE)
