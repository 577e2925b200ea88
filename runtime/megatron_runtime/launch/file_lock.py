"""Locks of files between processes."""

from __future__ import annotations

import fcntl
from typing import IO


def try_lock(file: IO[str]) -> bool:
    """Lock a file until it is closed, unless another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
