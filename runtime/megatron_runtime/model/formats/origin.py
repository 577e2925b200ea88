"""The files of a decoder's weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.checkpoint_path import gguf_parts, torch_dist_folder

_WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json", ".metadata", "*.distcp")
"""The files of a folder that decide its weights."""


@dataclass(frozen=True)
class Origin:
    """The files of a checkpoint at the time of reading."""

    path: Path
    files: tuple[tuple[str, int, int], ...]
    """Relative path, bytes and modification time (nanoseconds) of each file."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """The current file, with the other parts of a divided GGUF file; or those in the folder and in that of its
        latest iteration that decide the weights. Others, for instance a log, may change.
        """
        if path.is_dir():
            base, folders = path, {path, torch_dist_folder(path) or path}
            files = sorted(file for folder in folders for name in _WEIGHTS for file in folder.glob(name))
        else:
            base, files = path.parent, gguf_parts(path)
        stats = [(str(file.relative_to(base)), file.stat()) for file in files]
        return cls(path, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    def is_unchanged(self) -> bool:
        """Whether sizes and times of the files are unchanged."""
        try:
            return Origin.of(self.path) == self
        except (OSError, CheckpointError):
            return False
