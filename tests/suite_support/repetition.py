"""How often a test repeats what it does: a fixed, smaller run in `make test`, the whole one in `make test-long`.

Repetition alone differs: counts of made-up inputs, seeds, durations. A test that asks here has the mark ``repetition``,
by which `make test-long` finds it.
"""

from __future__ import annotations

import os
import secrets
from typing import TypeVar

Count = TypeVar("Count")

LONG_VARIABLE = "MEGATRON_TEST_LONG"
FIXED_SEED = 20_260_101


def is_long() -> bool:
    """Whether this is the long run."""
    return os.environ.get(LONG_VARIABLE, "0") not in ("", "0")


def repeated(short: Count, long: Count) -> Count:
    """The one that belongs to this run."""
    return long if is_long() else short


def seed_of_run(variable: str) -> int:
    """That of the environment variable, or a fixed one; in the long run another one each time."""
    if chosen := os.environ.get(variable):
        return int(chosen)
    return secrets.randbits(32) if is_long() else FIXED_SEED
