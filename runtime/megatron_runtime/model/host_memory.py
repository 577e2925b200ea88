"""What the C library keeps of freed memory."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Hand freed memory back to the system, where the C library can (glibc keeps freed blocks of up to 32 MiB)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
