"""Fills one folder of a model cache with a download: verified, and complete as soon as it has its name.

The folders of a cache lie beside each other, one for each source. A file in a complete folder lists what was
downloaded. While a download runs, its folder has the suffix ``.partial``, and the next run continues it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.launch.file_lock import try_lock
from megatron_runtime.launch.identity import TERMINATION_LOG_VARIABLE
from megatron_runtime.launch.sample_model import alone
from megatron_runtime.model.formats.checkpoint_path import checkpoint_path
from megatron_runtime.model.formats.hub_files import RemoteFile, hub_files, verify
from megatron_runtime.model.formats.object_storage import download_objects, object_files
from megatron_runtime.model.formats.source import resolve_source

RECORD = ".megatron-cache.json"
"""In each complete folder: the source and the files."""
PARTIAL = ".partial"
READABLE = 0o444
SEARCHABLE = 0o555


@dataclass(frozen=True)
class HubSource:
    """What is downloaded: a repository of the hub, or with ``file`` one GGUF file of it."""

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return f"Hugging Face repository {self.repo}"

    def files(self) -> Sequence[RemoteFile]:
        """The files to download, of the commit that the revision names now."""
        return hub_files(self.repo, file=self.file, revision=self.revision, token=None)

    def download(self, folder: Path, files: Sequence[RemoteFile]) -> None:
        """Downloads the files into the folder."""
        # The commit instead of the revision: a branch may move meanwhile, and the checksums are those of this commit.
        revision = files[0].commit or self.revision
        resolve_source(hf_repo=self.repo, hf_file=self.file, revision=revision, folder=folder)


@dataclass(frozen=True)
class ObjectSource:
    """What is downloaded: the objects below a URI of object storage, or the GGUF file that it names."""

    uri: str

    def __str__(self) -> str:
        return self.uri

    def files(self) -> Sequence[RemoteFile]:
        """The objects to download."""
        return object_files(self.uri)

    def download(self, folder: Path, files: Sequence[RemoteFile]) -> None:
        """Downloads the objects into the folder."""
        download_objects(self.uri, folder, files)
        checkpoint_path(folder)


Source = HubSource | ObjectSource


@dataclass
class Download:
    """The state of a download, which another thread may read. ``files`` are None until the hub has named them."""

    folder: Path
    files: list[RemoteFile] | None = None
    is_complete: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files or ())

    @property
    def loaded_bytes(self) -> int:
        """Bytes on the disk, also those of files that are not complete yet."""
        if self.is_complete:
            return self.total_bytes
        sizes = (
            max(0, _size(Path(folder, name))) for folder, _, names in os.walk(_partial(self.folder)) for name in names
        )
        return min(sum(sizes), self.total_bytes)

    def body(self) -> dict[str, Any]:
        """The answer of ``GET /v1/state``: the download in the place of the weights that a rank loads."""
        ranks = [{"rank": 0, "phase": "Loading", "loadedBytes": self.loaded_bytes, "totalBytes": self.total_bytes}]
        return {"revision": self.loaded_bytes, "ready": False, "ranks": ranks}


def fill(download: Download, source: Source) -> None:
    """Downloads the source into the folder, verifies it and removes what an interrupted run left; once.

    Of several concurrent runs one downloads and the others wait. Raises CheckpointError, ConfigurationError or OSError.
    """
    folder = download.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(_lock(folder)):
        if (recorded := _recorded(folder)) is not None:
            os.utime(folder)  # it is used again
        else:
            files = list(source.files())
            if not files:
                raise CheckpointError(f"{source}: has no files of a checkpoint. Check its name")
            download.files = files
            _download(download, source)
            recorded = files
        download.files, download.is_complete = recorded, True


def evict(folder: Path, *, unused_for: float) -> bool:
    """Removes the folder, complete or not, and returns whether it is gone.

    It stays while a run fills it, and if a run has filled or found it in the last ``unused_for`` seconds. Raises
    CheckpointError for a folder that is not of this module, and OSError.
    """
    if not folder.parent.exists():
        return True
    partial = _partial(folder)
    with _lock(folder).open("w") as file:
        if not try_lock(file) or (folder.exists() and time.time() - folder.stat().st_mtime < unused_for):
            return False
        if folder.exists() and not (folder / RECORD).exists():
            raise CheckpointError(f"{folder}: is no folder of a model cache, as it has no {RECORD}. Name another one")
        for each in (partial, folder):
            if each.exists():
                # By a rename, so that an interrupted removal leaves no folder that seems to be complete.
                shutil.rmtree(each if each == partial else each.rename(partial))
    return True


def report_success(download: Download) -> None:
    """Writes the size and the commit into the termination log, if there is one."""
    if log := os.environ.get(TERMINATION_LOG_VARIABLE):
        commit = download.files[0].commit if download.files else ""
        Path(log).write_text(json.dumps({"bytes": download.total_bytes, "commit": commit}) + "\n")


def _download(download: Download, source: Source) -> None:
    folder, files = download.folder, download.files or []
    partial = _partial(folder)
    source.download(partial, files)
    verify(partial, files)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes about an unfinished download
    record = {"source": asdict(source), "files": [asdict(file) for file in files]}
    (partial / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    for path in [partial, *partial.rglob("*")]:  # pods read it as another user
        path.chmod(path.stat().st_mode | (SEARCHABLE if path.is_dir() else READABLE))
    if folder.exists():
        shutil.rmtree(folder)
    partial.replace(folder)


def _recorded(folder: Path) -> list[RemoteFile] | None:
    """The files of a complete folder; None where it has to be filled, or files are missing or have other sizes."""
    try:
        files = [RemoteFile(**file) for file in json.loads((folder / RECORD).read_text())["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if all(_size(folder / file.name) == file.size for file in files) else None


def _lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{PARTIAL}")


def _size(path: Path) -> int:
    """The size of a file; -1 without it: it may just have got another name."""
    try:
        return path.stat().st_size
    except OSError:
        return -1
