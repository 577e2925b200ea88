"""The folder in which the frontends of one launcher keep their counts."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path

PREFIX = "megatron-metrics-"
LOCK = "lock"


class MetricsFolder:
    """Is there until ``close``. What a launcher left that was killed, the next one removes.

    A lock in the folder tells whether its launcher lives: the kernel gives it back however that one ends.

    Args:
        parent: Where the folder is made, and where abandoned ones are looked for; by default the temporary folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # Under its final name the lock is held from the beginning: nobody finds it free and takes us for dead.
        made = self.path / f"{LOCK}.new"
        self._lock = made.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / LOCK)

    def close(self) -> None:
        """Removes the folder; a second call has no effect."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Those of other users can't be opened, and are left alone."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
