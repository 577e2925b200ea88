"""The memory of a process, as measured by the kernel."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_SELF = Path("/proc/self")
_FILE = re.compile(r"^(\w+)-(\w+) r\S+ \w+ \S+ \d+ +/", re.MULTILINE)
_PIECE = 2**20
_ENTRY_BYTES = 8


def peak_growth(do: Callable[[], _T]) -> tuple[_T, int]:
    """The result of the action, and the growth in bytes of this process's memory meanwhile.

    Mapped files, such as its code, count from the start, because the kernel chooses how much of them is in memory.
    """
    for begin, end in _mapped_files():
        _bring_in(begin, end)
    before = resident_bytes()
    reset_peak()
    outcome = do()
    return outcome, peak_bytes() - before


def resident_bytes(pid: int | str = "self") -> int:
    """The current memory of the process."""
    return _status(pid, "VmRSS")


def resident_share(blocks: Iterable[range]) -> float:
    """The share of the pages within these ranges of addresses that is in memory, whatever else the process frees."""
    present = [entry >> 63 for block in blocks for entry in _page_entries(block)]
    return sum(present) / len(present)


def freed_between_blocks_in_use(count: int, size: int) -> tuple[list[bytearray], list[range]]:
    """Blocks in use, and the addresses of the freed ones between them, which the C library keeps; ``count`` in all."""
    blocks = [bytearray(size) for _ in range(count)]
    return blocks[::2], [addresses(block) for block in blocks[1::2]]


def addresses(block: bytearray) -> range:
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    return range(start, start + len(block))


def _page_entries(block: range) -> Iterator[int]:
    """One entry of the kernel's page map for each page that lies completely in the range."""
    first, end = -(-block.start // mmap.PAGESIZE), block.stop // mmap.PAGESIZE
    with (_SELF / "pagemap").open("rb", buffering=0) as entries:
        entries.seek(first * _ENTRY_BYTES)
        return iter(memoryview(entries.read((end - first) * _ENTRY_BYTES)).cast("Q"))


def _mapped_files() -> Iterator[tuple[int, int]]:
    """Start and end of each mapped file in this process's memory."""
    for found in _FILE.finditer((_SELF / "maps").read_text()):
        yield int(found[1], 16), int(found[2], 16)


def _bring_in(begin: int, end: int) -> None:
    with (_SELF / "mem").open("rb", buffering=0) as memory:
        for place in range(begin, end, _PIECE):
            memory.seek(place)
            with suppress(OSError):  # pages beyond the end of a file
                memory.read(min(_PIECE, end - place))


def reset_peak(pid: int | str = "self") -> None:
    """Let the peak of the process begin at its current memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int | str = "self") -> int:
    """The largest memory that the process has had, since the last reset if there was one."""
    return _status(pid, "VmHWM")


def _status(pid: int | str, name: str) -> int:
    words = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", words)[1]) * 1024  # type: ignore[index]
