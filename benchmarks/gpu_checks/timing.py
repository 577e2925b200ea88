"""The time of work on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gpu_checks.results import DEVICE, Sizes


def seconds(work: Callable[[], object], sizes: Sizes) -> float:
    """Of one call, the fastest of several after a warm-up."""
    work()
    found = []
    for _ in range(sizes.repeats):
        wait(sizes)
        start = time.perf_counter()
        work()
        wait(sizes)
        found.append(time.perf_counter() - start)
    return min(found)


def wait(sizes: Sizes) -> None:
    """Until the device has done all."""
    if sizes.has_gpu:
        torch.cuda.synchronize(DEVICE)
