"""Processes of this machine, from /proc. A zombie counts as ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process. Its start time (clock ticks since boot) distinguishes it from a later one with the same id."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Stat:
    process: Process
    parent: int
    group: int
    session: int


def is_running(pid: int) -> bool:
    """Whether a process with this id is running."""
    return _stat(pid) is not None


def is_alive(process: Process) -> bool:
    """Whether this process is running."""
    stat = _stat(process.pid)
    return stat is not None and stat.process == process


def group_is_alive(leader: int) -> bool:
    """Whether any process of the group or session with this id is running."""
    return any(leader in (stat.group, stat.session) for stat in _living())


def descendants(ancestor: int) -> set[Process]:
    """All running descendants of a process."""
    children: dict[int, list[Process]] = {}
    for stat in _living():
        children.setdefault(stat.parent, []).append(stat.process)
    found: set[Process] = set()
    below = [ancestor]
    while below:
        for child in children.get(below.pop(), []):
            found.add(child)
            below.append(child.pid)
    return found


def _living() -> Iterator[_Stat]:
    for folder in PROC.iterdir():
        if folder.name.isdecimal() and (stat := _stat(int(folder.name))) is not None:
            yield stat


def _stat(pid: int) -> _Stat | None:
    """None for a process that has ended, even during the read."""
    try:
        # The name before the parenthesis may contain spaces and parentheses.
        fields = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return _Stat(Process(pid, int(fields[19])), parent=int(fields[1]), group=int(fields[2]), session=int(fields[3]))
