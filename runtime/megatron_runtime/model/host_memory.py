"""Host memory that returns to the system when it is released."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor, nn


def empty_matrix(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    """Weights [rows, columns] for a checkpoint to fill, on the default device.

    On the host they have separate pages: most matrices are released one by one after they are packed, and the C library
    would keep the holes, up to half of the model again.
    """
    if torch.empty(0).device.type != "cpu" or not rows * columns:
        return nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
    pages = _pages(rows * columns * dtype.itemsize)
    return nn.Parameter(torch.frombuffer(pages, dtype=dtype).view(rows, columns), requires_grad=False)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the host, in pages that the system allocates at the first write.

    Raises:
        MemoryError: The system can't provide this much.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    try:
        return torch.frombuffer(_pages(size), dtype=dtype).view(shape)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error


def _pages(size: int) -> mmap.mmap:
    """Separate pages, which contain zeros until the first write."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages are faster where matrices are not packed. Not every system has them.
    with contextlib.suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
