"""Kernels of our own on the threads that PyTorch's operators run on.

Those are awake while a layer computes. Threads of another pool would have to be woken for every layer, and would meet
them on the same cores.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import torch

_settings: Any = numba.config


@cache
def can_share_threads() -> bool:
    """Whether numba's OpenMP is PyTorch's; with another one, or none, kernels run in the thread that calls them."""
    try:
        # PyTorch has loaded GNU's library by now; under the same name numba gets the same one.
        from numba.np.ufunc import omppool  # type: ignore[attr-defined]  # noqa: F401
    except ImportError:
        return False
    _settings.THREADING_LAYER = "omp"
    return True


def kernel_threads() -> int:
    """How many threads a kernel gets that is called in this one: as many as an operator, if there are so many."""
    if not can_share_threads():
        return 1
    wanted = torch.get_num_threads()
    if numba.get_num_threads() != wanted:
        numba.set_num_threads(min(wanted, _settings.NUMBA_NUM_THREADS))
        # When numba wakes its threads, it sets OpenMP's number for everybody.
        torch.set_num_threads(wanted)
    return int(numba.get_num_threads())
