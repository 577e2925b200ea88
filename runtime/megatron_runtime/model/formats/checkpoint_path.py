"""The file or folder that a path to a checkpoint refers to."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import TypeVar

from megatron_runtime.errors import CheckpointError

TORCH_DIST_METADATA = ".metadata"
"""The file of ``torch.distributed.checkpoint`` that marks its folder."""
_NEEDED = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.gguf", "tokenizer.json")
"""Files of a checkpoint's folder that must not be dangling links."""
AnyPath = TypeVar("AnyPath", bound=PurePath)
_GGUF_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf")
_LATEST = "latest_checkpointed_iteration.txt"
"""In the folder of a Megatron training, beside a folder for each saved iteration: a number, or ``release``."""


def checkpoint_path(path: Path | str) -> Path:
    """The GGUF file, or the folder with a config.json, for ``path``: with one GGUF file in a folder, that file.

    In the folder of a Megatron training the config.json is at the top, or in the latest iteration's folder.
    """
    path = Path(path)
    refuse_dangling_link(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist. Name a GGUF file, or the folder of a Hugging Face checkpoint")
    if path.is_file():
        return _first_part(path)
    for file in sorted(path.iterdir()):
        if any(fnmatch(file.name, pattern) for pattern in _NEEDED):
            refuse_dangling_link(file)
    if (path / "config.json").exists():
        return path
    if (latest := torch_dist_folder(path)) is not None:
        if (latest / "config.json").exists():
            return latest
        raise CheckpointError(
            f"{path}: holds a Megatron checkpoint, but no config.json. Put the model's Hugging Face configuration "
            "and tokenizer beside it"
        )
    files = sorted(path.glob("*.gguf"))
    if len({gguf_parts(file)[0] for file in files}) > 1:
        listed = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: holds several GGUF files ({listed}). Name one of them")
    if not files:
        raise CheckpointError(
            f"{path}: neither config.json nor a .gguf file found. "
            "Name a GGUF file, or the folder of a Hugging Face checkpoint"
        )
    return _first_part(files[0])


def gguf_parts(path: AnyPath) -> list[AnyPath]:
    """All parts of the model of which the GGUF file ``path`` is one, by its name as ``llama-gguf-split`` gives it; the
    first one has the metadata. Of other names, the file itself.
    """
    if (match := _GGUF_PART.fullmatch(path.name)) is None:
        return [path]
    stem, count = match[1], int(match[2])
    return [path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)] or [path]


def model_name(path: PurePath) -> str:
    """The name of a file or folder, without that of the part and the suffix of a GGUF file."""
    match = _GGUF_PART.fullmatch(path.name)
    return path.name.removesuffix(".gguf") if match is None else match[1]


def _first_part(path: Path) -> Path:
    """The first of the parts of a GGUF file. Raises CheckpointError if one is missing."""
    parts = gguf_parts(path)
    if missing := [part.name for part in parts if not part.exists()]:
        raise CheckpointError(f"{path}: is one of {len(parts)} parts; {', '.join(missing)} missing. Fetch them")
    return parts[0]


def refuse_dangling_link(path: Path) -> None:
    """Raise CheckpointError if ``path`` is a symbolic link to a file that does not exist."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path}: is a link to {path.readlink()}, which does not exist. Fetch the file again; a copy of a folder "
            "in the cache of Hugging Face needs the files that its links name (cp --dereference)"
        )


def torch_dist_folder(folder: Path) -> Path | None:
    """The folder of the ``torch_dist`` checkpoint: ``folder`` or its latest iteration; None without one.

    Raises CheckpointError when the latest iteration is missing, or has another of Megatron's formats.
    """
    if (folder / TORCH_DIST_METADATA).exists():
        return folder
    tracker = folder / _LATEST
    if not tracker.is_file():
        return None
    said = tracker.read_text(errors="replace").strip()
    if re.fullmatch("[0-9]{1,18}|release", said) is None:
        raise CheckpointError(f"{tracker}: says {said[:40]!r}, expected the number of an iteration, or release")
    latest = folder / (said if said == "release" else f"iter_{int(said):07d}")
    if not latest.exists():
        raise CheckpointError(f"{tracker}: says {said}, but there is no {latest.name} beside it. Fetch that folder too")
    if not (latest / TORCH_DIST_METADATA).exists():
        raise CheckpointError(
            f"{latest}: no {TORCH_DIST_METADATA} found, so it isn't in the format torch_dist. "
            "Have Megatron save it with --ckpt-format torch_dist, or fetch the whole folder again"
        )
    return latest
