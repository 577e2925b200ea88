"""The folder with the metrics of one launcher's frontends."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path

from megatron_runtime.launch.file_lock import try_lock

PREFIX = "megatron-metrics-"
LOCK = "lock"


class MetricsFolder:
    """Exists until ``close``. The next launcher removes the folder of one that was killed.

    The launcher holds a lock in its folder; the kernel releases the lock when the launcher ends.

    Args:
        parent: Parent of the folders; by default the temporary folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        # The file is locked before it gets its final name, so that no other launcher finds it unlocked.
        made = self.path / f"{LOCK}.new"
        self._lock = made.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(self.path / LOCK)

    def close(self) -> None:
        """Removes the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Folders of other users can't be opened, and stay."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / LOCK).open() as lock:
            if try_lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
