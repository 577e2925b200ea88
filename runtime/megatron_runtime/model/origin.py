"""The files that a decoder's weights came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Origin:
    """A checkpoint as it was when it was read."""

    path: Path
    files: tuple[tuple[str, int, int], ...]
    """Name, bytes and time of change (nanoseconds) of each file."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """The file, or the files directly in the folder, as they are now."""
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files]
        return cls(path, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    def is_unchanged(self) -> bool:
        """Whether the same files are still there, as far as sizes and times tell."""
        try:
            return Origin.of(self.path) == self
        except OSError:
            return False
