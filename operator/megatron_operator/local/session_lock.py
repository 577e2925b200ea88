"""At most one session serves a file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


class AlreadyServedError(Exception):
    """Another session serves the file; ``str()`` names its process."""


@contextlib.contextmanager
def session_lock(file: Path) -> Iterator[None]:
    """Holds the lock of a resource's file. Raises AlreadyServedError.

    The kernel releases the lock when the process ends, however it ends. Editors replace files, so the lock is on a file
    of its own.
    """
    name = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"megatron-local-{os.getuid()}-{name}.lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise AlreadyServedError(
                f"{file} is already served by process {holder}: edit the file to change what it serves, or end it with "
                "Ctrl-C first"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
