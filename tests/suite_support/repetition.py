"""The number of repetitions of a test: a fixed, smaller one in `make test`, the full one in `make test-long`.

Only repetitions differ: counts of generated inputs, seeds, durations. A test that uses this module has the mark
``repetition``, by which `make test-long` selects it.
"""

from __future__ import annotations

import os
import random
import secrets
from typing import TypeVar

Count = TypeVar("Count")

LONG_VARIABLE = "MEGATRON_TEST_LONG"
FIXED_SEED = 20_260_101


def is_long() -> bool:
    """Whether this is the long run."""
    return os.environ.get(LONG_VARIABLE, "0") not in ("", "0")


def repeated(short: Count, long: Count) -> Count:
    """The count for this run."""
    return long if is_long() else short


def seed_of_run(variable: str) -> int:
    """The seed in the environment variable, or a fixed one; in the long run a random one."""
    if chosen := os.environ.get(variable):
        return int(chosen)
    return secrets.randbits(32) if is_long() else FIXED_SEED


def rng_of_run(variable: str) -> random.Random:
    """A generator with this seed, which is printed so that the run can be repeated."""
    seed = seed_of_run(variable)
    print(f"{variable}={seed}")
    return random.Random(seed)
