"""Downloads from object storage: ``s3://`` and ``gs://``, with the library obstore.

Credentials and endpoints are variables of the environment, as obstore reads them, such as AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL and GOOGLE_SERVICE_ACCOUNT_KEY.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.model.formats.checkpoint_path import gguf_parts
from megatron_runtime.model.formats.hub_files import RemoteFile

if TYPE_CHECKING:
    from obstore import GetOptions

SCHEMES = ("s3://", "gs://")
THREADS = 4
PART = 8 << 20
NOTES = ".cache"
"""Folder for the ETags of complete files, as that of the hub's library."""
SUMS = "SHA256SUMS"
_SUM = re.compile(r"(?P<sum>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
CHANGED = "an object changed while it was downloaded. Start again"
MISSING = "the library obstore is not installed. Install it: pip install 'megatron-inference[object-storage]'"


def is_object_storage(source: str) -> bool:
    """Whether the source is a URI of object storage."""
    return source.startswith(SCHEMES)


def object_files(uri: str) -> Sequence[RemoteFile]:
    """The objects below ``uri``, or with a ``.gguf`` at its end this one and the other parts of it.

    Their ETags are no checksums in general. Raises ConfigurationError without the library, and CheckpointError.
    """
    store, file = _store(uri)
    import obstore

    with _errors(uri):
        if file is not None:
            found = [obstore.head(store, part.as_posix()) for part in gguf_parts(PurePosixPath(file))]
        else:
            found = [each for batch in obstore.list(store) for each in batch]
        sums = _sums(store)
    names = [str(each["path"]) for each in found]
    if unsafe := [name for name in names if ".." in PurePosixPath(name).parts or name.startswith("/")]:
        raise CheckpointError(f"{uri}: has the object {unsafe[0]}, which leads out of its folder. Rename it")
    files = [
        RemoteFile(str(each["path"]), int(each["size"]), str(each["e_tag"] or ""), "", sums.get(str(each["path"]), ""))
        for each in found
    ]
    if file is None and (missing := sorted(sums.keys() - names)):
        raise CheckpointError(f"{uri}: {SUMS} lists {missing[0]}, which the bucket does not have. Upload it")
    return [file for file in files if file.name != SUMS and not _is_folder(file, names)]


def _sums(store: Any) -> dict[str, str]:
    """The SHA-256 of files by name, from ``SHA256SUMS`` in their folder, in the format of sha256sum; empty without one.

    Raises CheckpointError for another format.
    """
    import obstore
    from obstore.exceptions import PermissionDeniedError

    try:
        text = bytes(obstore.get(store, SUMS).bytes()).decode(errors="replace")
    except (FileNotFoundError, PermissionDeniedError):  # S3 answers so if the keys may not list the bucket
        return {}
    found = [(line, _SUM.fullmatch(line)) for line in text.splitlines() if line.strip()]
    if wrong := [line for line, match in found if match is None]:
        raise CheckpointError(f"{SUMS}: {wrong[0]!r} is no line of it. Write it with sha256sum")
    return {match["name"].removeprefix("./"): match["sum"].lower() for _, match in found if match is not None}


def download_objects(uri: str, folder: Path, files: Sequence[RemoteFile]) -> None:
    """Downloads the objects into the folder, several at a time. Those of an earlier run are kept if they are the same.

    Raises CheckpointError, also when an object changes meanwhile.
    """
    store, _ = _store(uri)
    with _errors(uri), ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda file: _download(store, folder, file), files))


def _is_folder(file: RemoteFile, names: Sequence[str]) -> bool:
    """Whether it is an empty object that stands for a folder, as the consoles of both stores create them."""
    return file.size == 0 and (not file.name or any(name.startswith(f"{file.name}/") for name in names))


def _download(store: Any, folder: Path, file: RemoteFile) -> None:
    import obstore

    path, note = folder / file.name, folder / NOTES / f"{file.name}.etag"
    if path.exists() and note.exists() and note.read_text() == file.etag:
        return
    for each in (path, note):
        each.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.incomplete")
    options: GetOptions = {"if_match": file.etag} if file.etag else {}
    answer = obstore.get(store, file.name, options=options)
    if _unquoted(answer.meta["e_tag"]) != _unquoted(file.etag):  # not all servers evaluate the condition
        raise CheckpointError(f"{file.name}: {CHANGED}")
    with partial.open("wb") as target:
        for chunk in answer.stream(min_chunk_size=PART):
            target.write(chunk)
    partial.replace(path)
    note.write_text(file.etag)


def _unquoted(etag: str | None) -> str:
    """Some servers quote ETags in answers to requests for objects but not in lists."""
    return (etag or "").strip('"')


def _store(uri: str) -> tuple[Any, str | None]:
    """The store whose root is the folder of ``uri``, and the name of the GGUF file in it, if there is one."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigurationError(f"{uri}: {MISSING}") from error
    root, _, name = uri.rpartition("/")
    with _errors(uri):
        return (from_url(root), name) if name.endswith(".gguf") else (from_url(uri.rstrip("/")), None)


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    """Converts errors of the library to CheckpointError with the URI and the remedy."""
    from obstore.exceptions import BaseError, PreconditionError

    try:
        yield
    except PreconditionError as error:
        raise CheckpointError(f"{uri}: {CHANGED}") from error
    except (BaseError, OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fix = "Check the name, the credentials and the endpoint in the environment"
        raise CheckpointError(f"{uri}: the download failed ({reason}). {fix}") from error
