"""Detects that a child process hangs: it sends no heartbeats for too long."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BLOCKED_SECONDS = 4.0
"""Limit for blocked children whose heartbeats come from an event loop, which waits for short times only."""

_BUSY = frozenset("RDt")
"""States of a thread that explain a silence without a hang: it runs, waits for a processor or a disk, or a debugger has
stopped it."""


@dataclass(frozen=True)
class SilenceLimits:
    """Seconds without a heartbeat after which a child counts as hung."""

    total: float = math.inf
    blocked: float = math.inf
    """For a child whose threads are all blocked meanwhile: neither work nor a busy machine delays its heartbeats."""

    def __mul__(self, factor: float) -> SilenceLimits:
        return SilenceLimits(self.total * factor, self.blocked * factor)


UNLIMITED = SilenceLimits()


class Silence:
    """The time since the last heartbeat of a child.

    It counts intervals instead of reading a clock: a parent that was stopped itself must not kill its children.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._blocked = 0.0

    def end(self) -> None:
        """Begin again, after a heartbeat."""
        self._total = self._blocked = 0.0

    def add(self, seconds: float, *, blocked: bool) -> None:
        """Count an interval at whose end the child has sent no heartbeat, and `is_blocked` or not."""
        self._total += seconds
        self._blocked = self._blocked + seconds if blocked else 0.0

    def beyond(self, limits: SilenceLimits) -> tuple[float, str] | None:
        """The limit that is reached, with an explanation to append to a message; None if none is."""
        if self._total >= limits.total:
            return limits.total, ""
        if self._blocked >= limits.blocked:
            return limits.blocked, ": all its threads were blocked"
        return None


def is_blocked(pid: int) -> bool:
    """Whether all threads of the process sleep or were stopped by a signal.

    False on other systems than Linux, which do not report the states of threads in this way.
    """
    if sys.platform != "linux":
        return False
    states = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            # The name before the state is in parentheses, and may contain some.
            states.add(thread.read_text(errors="replace").rpartition(")")[2].split()[0])
    return bool(states) and not states & _BUSY
