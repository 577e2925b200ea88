"""Memory of the host that goes back to the system once it is let go."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from torch import nn


def empty_matrix(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    """Weights [rows, columns] that a checkpoint will fill, on the device that is the default.

    On the host they lie in pages of their own, whatever their size: most matrices are let go one by one once they are
    packed, and the C library would keep holes of their sizes, up to half of the model again.
    """
    if torch.empty(0).device.type != "cpu" or not rows * columns:
        return nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
    pages = mmap.mmap(-1, rows * columns * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Where matrices are not packed, large pages are faster to look up. Not every system has them.
    with contextlib.suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return nn.Parameter(torch.frombuffer(pages, dtype=dtype).view(rows, columns), requires_grad=False)


def return_freed_memory() -> None:
    """Hand freed memory back to the system, where the C library can (glibc keeps freed blocks of up to 32 MiB)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
