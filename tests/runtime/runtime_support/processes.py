"""Processes in /proc.

The local operator reads it too, but the runtime's tests must run without the operator.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")


def children_of(parent: int) -> dict[int, str]:
    """Living direct children of a process, with their command lines."""
    found = {}
    for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()):
        if _parent(pid) == parent:
            with contextlib.suppress(OSError):
                found[pid] = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    return _parent(pid) is not None


def _parent(pid: int) -> int | None:
    """None for a process that has ended."""
    try:
        # The name before the parenthesis may contain anything.
        state, parent = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)
