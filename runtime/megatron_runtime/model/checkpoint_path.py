"""What file or folder a path to a checkpoint means."""

from __future__ import annotations

from pathlib import Path

from megatron_runtime.errors import CheckpointError

TORCH_DIST_METADATA = ".metadata"
"""The file that a folder of ``torch.distributed.checkpoint`` has beside its data."""


def checkpoint_path(path: Path | str) -> Path:
    """The GGUF file, or the folder with a config.json, that ``path`` means: with one GGUF file in it, that file."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist. Name a GGUF file, or the folder of a Hugging Face checkpoint")
    if path.is_file():
        return path
    if (path / "config.json").exists():
        return path
    if (path / TORCH_DIST_METADATA).exists():
        raise CheckpointError(
            f"{path}: holds a Megatron checkpoint, but no config.json. Put the model's Hugging Face configuration "
            "and tokenizer beside it"
        )
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
