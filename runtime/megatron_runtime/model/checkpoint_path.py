"""What file or folder a path to a checkpoint means."""

from __future__ import annotations

from pathlib import Path

from megatron_runtime.errors import CheckpointError


def checkpoint_path(path: Path | str) -> Path:
    """The GGUF file or the Hugging Face folder that ``path`` means: a folder with one GGUF file means that file."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist. Name a GGUF file, or the folder of a Hugging Face checkpoint")
    if path.is_file():
        return path
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        listed = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: holds several GGUF files ({listed}). Name one of them")
    if not files:
        raise CheckpointError(
            f"{path}: neither config.json nor a .gguf file found. "
            "Name a GGUF file, or the folder of a Hugging Face checkpoint"
        )
    return files[0]
