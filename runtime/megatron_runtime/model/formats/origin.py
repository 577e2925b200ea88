"""The files that a decoder's weights came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.checkpoint_path import torch_dist_folder


@dataclass(frozen=True)
class Origin:
    """A checkpoint as it was when it was read."""

    path: Path
    files: tuple[tuple[str, int, int], ...]
    """Place below the path, bytes and time of change (nanoseconds) of each file."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """The file, or the files in the folder and in that of its latest iteration, as they are now."""
        folders = {path, torch_dist_folder(path) or path} if path.is_dir() else set()
        files = sorted(file for folder in folders for file in folder.iterdir() if file.is_file()) or [path]
        stats = [(str(file.relative_to(path)), file.stat()) for file in files]
        return cls(path, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    def is_unchanged(self) -> bool:
        """Whether the same files are still there, as far as sizes and times tell."""
        try:
            return Origin.of(self.path) == self
        except (OSError, CheckpointError):
            return False
