"""The memory allocator of the C library."""

from __future__ import annotations

import ctypes
import os

_TUNABLES = "GLIBC_TUNABLES"
_LARGE_BLOCK = 1 << 20


def returns_large_blocks() -> dict[str, str]:
    """Environment of a child process that returns every large block to the system when it is freed.

    By default, glibc keeps freed blocks of a size that it has seen before (up to 32 MiB), so a few large messages would
    increase the memory of a process for good. Settings of the user have precedence.
    """
    return {} if _TUNABLES in os.environ else {_TUNABLES: f"glibc.malloc.mmap_threshold={_LARGE_BLOCK}"}


def return_freed_memory() -> None:
    """Return freed memory to the system, where the C library can (glibc keeps freed blocks of up to 32 MiB)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
