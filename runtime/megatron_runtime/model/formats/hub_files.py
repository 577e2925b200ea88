"""Files of a repository of the Hugging Face hub: what the hub states about each of them, and the check against it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.checkpoint_path import gguf_parts
from megatron_runtime.model.formats.source import OTHER_FORMATS, WANTED_FILES, hub_errors

CHUNK = 1 << 20
_SHA256, _GIT_SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub states it. ``commit`` is the one that the revision named at that time."""

    name: str
    size: int
    """Bytes."""
    etag: str
    """SHA-256 of a large file; of other files, git's SHA-1 of the blob. Other hubs may state other values."""
    commit: str
    sha256: str = ""
    """Of a bucket's file, as ``SHA256SUMS`` states it; empty where there is none."""

    @property
    def stated(self) -> str:
        """The checksum to compare, if it is one."""
        return self.sha256 or self.etag

    @property
    def is_verifiable(self) -> bool:
        """Whether the source states a checksum of the content."""
        return bool(_SHA256.fullmatch(self.stated) or _GIT_SHA1.fullmatch(self.stated))


def hub_files(repo: str, *, file: str | None, revision: str | None, token: str | None) -> Sequence[RemoteFile]:
    """The files that a download of the repository gets; with ``file`` this GGUF file and the other parts of it.

    Raises CheckpointError when the hub does not have them, or does not answer.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    with hub_errors(repo, file, revision):
        if file is not None:
            names = [part.as_posix() for part in gguf_parts(PurePosixPath(file))]
        else:
            listed = HfApi(token=token).list_repo_files(repo, revision=revision)
            names = [name for name in listed if _matches(name, WANTED_FILES) and not _matches(name, OTHER_FORMATS)]
        found = [get_hf_file_metadata(hf_hub_url(repo, name, revision=revision), token=token) for name in names]
    return [
        RemoteFile(name, each.size or 0, each.etag or "", each.commit_hash or "")
        for name, each in zip(names, found, strict=True)
    ]


def verify(folder: Path, files: Sequence[RemoteFile]) -> None:
    """Compares size and checksum of each file below ``folder`` with what the hub states.

    Raises CheckpointError for the first file that differs, after it was removed, so that the next download fetches it
    again.
    """
    for file in files:
        path = folder / file.name
        if (found := path.stat().st_size) != file.size:
            difference = f"has {found} bytes, but the hub states {file.size}"
        elif file.is_verifiable and (checksum := _checksum(path, file.stated)) != file.stated:
            kind = "sha256" if _SHA256.fullmatch(file.stated) else "git's sha1"
            difference = f"{kind} is {checksum}, but {'SHA256SUMS' if file.sha256 else 'the hub'} states {file.stated}"
        else:
            continue
        path.unlink()
        raise CheckpointError(f"{file.name}: {difference}; the file was removed, and the next attempt fetches it again")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """As the library compares them."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def _checksum(path: Path, like: str) -> str:
    """The checksum of the same kind as ``like``."""
    if _SHA256.fullmatch(like):
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    # Git hashes a header with the length before the content.
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
