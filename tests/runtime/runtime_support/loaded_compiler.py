"""Numba with its tables of types and functions, which it fills at the first compilation.

A process that is forked after this import loads a cached kernel without filling them. No kernel is loaded here, because
numba refuses parallel kernels in a child of the process that has loaded one.
"""

from __future__ import annotations

from numba import int64, njit


@njit(int64(int64))
def same(value: int) -> int:
    """Compiled when this module is imported."""
    return value
