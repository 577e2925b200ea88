"""Work for several threads that is not PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def run_shares(work: Callable[[int, int], None], bounds: NDArray[np.int64]) -> None:
    """Call ``work(bounds[i], bounds[i + 1])`` for all i at once, and return when all are done.

    ``work`` has to let other threads run while it computes. The first share is done in this thread; the others wait
    for work without using the processor.
    """
    shares = [(int(first), int(last)) for first, last in pairwise(bounds) if first < last]
    others = [_pool(len(shares) - 1).submit(work, *share) for share in shares[1:]]
    try:
        if shares:
            work(*shares[0])
    finally:
        # What they write to must not be given away while they run.
        wait(others)
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernel")
