"""Returns to the system what large requests have used, some seconds after they have ended."""

from __future__ import annotations

import asyncio

from megatron_runtime.processes.allocator import return_freed_memory

LARGE_REQUEST_BYTES = 16 * 1024
"""Size of a body from which on the work on it may leave memory behind: a regular expression of 28 KiB takes 90 MiB."""
RETURN_SECONDS = 5.0


class FreedMemory:
    """Keeps the C library from holding the blocks between those that are in use.

    They are returned in a thread: this takes some milliseconds, but no lock of the interpreter.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def request_ended(self, size: int) -> None:
        """Return freed memory in ``RETURN_SECONDS``, once for all requests until then, if a body had many bytes."""
        if size >= LARGE_REQUEST_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETURN_SECONDS, self._return)

    def _return(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)
