"""The memory that a process holds, measured by the kernel and not by Python's own accounts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_SELF = Path("/proc/self")
_FILE = re.compile(r"^(\w+)-(\w+) r\S+ \w+ \S+ \d+ +/", re.MULTILINE)
_PIECE = 2**20


def peak_growth(do: Callable[[], _T]) -> tuple[_T, int]:
    """What comes of it, and by how many bytes the memory of this process grows at most while it is done.

    All files that it has mapped, its code above all, count from the start: how much of them is in memory is the
    kernel's choice at any time.
    """
    for begin, end in _mapped_files():
        _bring_in(begin, end)
    before = resident_bytes()
    (_SELF / "clear_refs").write_text("5")  # the peak begins anew
    outcome = do()
    return outcome, _status("self", "VmHWM") - before


def resident_bytes(pid: int | str = "self") -> int:
    """The memory that a process holds now."""
    return _status(pid, "VmRSS")


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Where each begins and ends in this process's memory."""
    for found in _FILE.finditer((_SELF / "maps").read_text()):
        yield int(found[1], 16), int(found[2], 16)


def _bring_in(begin: int, end: int) -> None:
    with (_SELF / "mem").open("rb", buffering=0) as memory:
        for place in range(begin, end, _PIECE):
            memory.seek(place)
            with suppress(OSError):  # pages beyond the end of a file
                memory.read(min(_PIECE, end - place))


def _status(pid: int | str, name: str) -> int:
    words = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", words)[1]) * 1024  # type: ignore[index]
