"""What /proc says about processes.

The local operator reads it too, but the runtime's tests must run where there is no operator.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")


def children_of(parent: int) -> dict[int, str]:
    """Direct children of a process that live, with their command lines."""
    found = {}
    for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()):
        if _parent(pid) == parent:
            with contextlib.suppress(OSError):
                found[pid] = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    return _parent(pid) is not None


def _parent(pid: int) -> int | None:
    """None for a process that has ended."""
    try:
        # The name before the parenthesis may hold anything.
        state, parent = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)
