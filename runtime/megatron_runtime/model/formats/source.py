"""Downloads a checkpoint if necessary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.model.formats.checkpoint_path import checkpoint_path, gguf_parts

WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*"]
"""Files of a checkpoint in the format of transformers."""
OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]
"""Copies of the weights in formats that are not read."""


def resolve_source(
    *,
    path: Path | str | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    folder: Path | None = None,
) -> Path:
    """The local path of a checkpoint: ``path`` itself, or the downloaded Hugging Face repository ``hf_repo``; with
    ``hf_file`` only this GGUF file of it, with the other parts of a divided one.

    Raises ConfigurationError unless exactly one of the two is given. Downloads are kept in the cache of the library,
    and used from there when the hub is unreachable; with ``folder`` they are stored there, without the cache. Raises
    CheckpointError if the path or the repository is invalid.
    """
    if (path is None) == (hf_repo is None):
        raise ConfigurationError(
            "model source: expected exactly one of a path and a Hugging Face repository", field="model"
        )
    if path is not None:
        return checkpoint_path(path)
    assert hf_repo is not None
    found = _download(hf_repo, hf_file, revision, token, folder)
    try:
        return checkpoint_path(found)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. GGUF files of a repository are downloaded by name") from error


def _download(repo: str, file: str | None, revision: str | None, token: str | None, folder: Path | None) -> str:
    """The file or folder in the cache of the library, or below ``folder``."""
    # Imported here, because local checkpoints do not need the library, which takes a while to import.
    from huggingface_hub import hf_hub_download, snapshot_download

    with hub_errors(repo, file, revision):
        if file is not None:
            parts = [part.as_posix() for part in gguf_parts(PurePosixPath(file))]
            first, *_ = [
                hf_hub_download(repo, part, revision=revision, token=token, local_dir=folder) for part in parts
            ]
            return first
        return snapshot_download(
            repo,
            revision=revision,
            token=token,
            local_dir=folder,
            allow_patterns=WANTED_FILES,
            ignore_patterns=OTHER_FORMATS,
        )


@contextmanager
def hub_errors(repo: str, file: str | None, revision: str | None) -> Iterator[None]:
    """Converts errors of the library to CheckpointError with the repository and the remedy."""
    from huggingface_hub.errors import HfHubHTTPError

    named = (f"{file} of " if file else "") + repo + (f" at revision {revision}" if revision else "")
    try:
        yield
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise CheckpointError(f"Hugging Face repository {named}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    """The remedy for a failed download. The order matters, because the errors inherit from each other."""
    from huggingface_hub import errors

    reason = (str(error) or type(error).__name__).splitlines()[0]
    explanations: list[tuple[type[Exception] | tuple[type[Exception], ...], str]] = [
        (errors.HFValidationError, "is no valid name, expected the form owner/name"),
        (errors.GatedRepoError, "is gated. Accept its terms on huggingface.co and give a token that may read it"),
        (
            errors.RepositoryNotFoundError,
            "does not exist, or is private. Check the name, or give a token that may read it",
        ),
        (errors.RevisionNotFoundError, "this revision does not exist. Name a branch, a tag or a commit"),
        (
            (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled),
            "the hub can't be reached and there is no copy in the cache. Check the network, or name a path instead",
        ),
        (errors.EntryNotFoundError, "has no such file. Check its name"),
        (errors.HfHubHTTPError, "the hub refused"),
    ]
    for kind, explanation in explanations:
        if isinstance(error, kind):
            return f"{explanation} ({reason})"
    return f"the download failed ({reason}). Check the network and the cache folder's free space"
