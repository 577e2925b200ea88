"""Returns freed memory to the system when the load that needed it is over."""

from __future__ import annotations

import asyncio
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_runtime.processes.allocator import return_freed_memory

REST_SECONDS = 5.0
"""Time without load after which memory is returned."""
SAMPLES = 5
"""In this time."""
GROWTH_BYTES = 8 << 20
"""Growth of the process that is worth it: the next pass has to get its memory again."""

_STATM = Path("/proc/self/statm")


async def return_memory_at_rest(is_loaded: Callable[[], bool]) -> None:
    """Return freed memory each time the process has grown and then had no load for `REST_SECONDS`, until cancelled.

    It is returned in a thread: meanwhile, which is some milliseconds, other threads can't get memory of the C library.
    Returns at once on other systems than Linux, which do not report the memory of a process in this way.

    Args:
        is_loaded: Whether what runs now may need the memory again.
    """
    if sys.platform != "linux":
        return
    least, quiet = _private_bytes(), 0
    while True:
        await asyncio.sleep(REST_SECONDS / SAMPLES)
        quiet = 0 if is_loaded() else quiet + 1
        size = _private_bytes()
        least = min(least, size)
        if quiet >= SAMPLES and size - least >= GROWTH_BYTES:
            await asyncio.to_thread(return_freed_memory)
            least, quiet = _private_bytes(), 0


def _private_bytes() -> int:
    """Resident memory of this process, without mapped files and memory that is shared."""
    _, resident, shared, *_ = map(int, _STATM.read_text().split())
    return (resident - shared) * mmap.PAGESIZE
