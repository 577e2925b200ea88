"""Memory of the host that goes back to the system once it is let go."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor, nn


def empty_matrix(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    """Weights [rows, columns] that a checkpoint will fill, on the device that is the default.

    On the host they lie in pages of their own, whatever their size: most matrices are let go one by one once they are
    packed, and the C library would keep holes of their sizes, up to half of the model again.
    """
    if torch.empty(0).device.type != "cpu" or not rows * columns:
        return nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
    pages = _pages(rows * columns * dtype.itemsize)
    return nn.Parameter(torch.frombuffer(pages, dtype=dtype).view(rows, columns), requires_grad=False)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the host, in pages that the system provides as they are first written to: nothing is touched here.

    Raises:
        MemoryError: The system can't provide so many.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        return torch.frombuffer(_pages(size), dtype=dtype).view(shape)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error


def _pages(size: int) -> mmap.mmap:
    """Pages of their own, which hold zeros until something is written."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Where matrices are not packed, large pages are faster to look up. Not every system has them.
    with contextlib.suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def return_freed_memory() -> None:
    """Hand freed memory back to the system, where the C library can (glibc keeps freed blocks of up to 32 MiB)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
