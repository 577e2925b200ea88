"""Runs compiled kernels on the threads of PyTorch's operators.

Those are awake while a layer computes. The threads of another pool would have to wake up in every layer, and would
compete for the same cores.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numba
import torch

_settings: Any = numba.config


class _Set(threading.local):
    """The numbers of threads that were set last for numba's kernels, of which each thread has its own."""

    torch = numba = 0


_set = _Set()


@cache
def can_share_threads() -> bool:
    """Whether numba's OpenMP library is that of PyTorch; otherwise kernels run in the calling thread.

    The first call starts numba's threads, and keeps PyTorch's number of threads: the start sets OpenMP's for the whole
    process. Without it, the first compiled kernel would start them.
    """
    try:
        # PyTorch has loaded GNU's library by now; numba gets it by the same name.
        from numba.np.ufunc import omppool  # type: ignore[attr-defined]  # noqa: F401
    except ImportError:
        return False
    _settings.THREADING_LAYER = "omp"
    wanted = torch.get_num_threads()
    numba.get_num_threads()
    if torch.get_num_threads() != wanted:  # setting it needlessly would start another pool of threads
        torch.set_num_threads(wanted)
    return True


def kernel_threads() -> int:
    """Number of threads of a kernel that is called in this thread: that of an operator, as far as they exist."""
    if not can_share_threads():
        return 1
    wanted = torch.get_num_threads()
    if _set.torch != wanted:
        _set.torch, _set.numba = wanted, min(wanted, _settings.NUMBA_NUM_THREADS)
        numba.set_num_threads(_set.numba)
    return _set.numba
