"""A checkpoint's tokenizer, without importing torch: HTTP frontends need no other part of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from megatron_runtime.model.formats.checkpoint_path import checkpoint_path
from megatron_runtime.model.tokenizer.hugging_face_tokenizer import hugging_face_tokenizer
from megatron_runtime.model.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a GGUF file or a Hugging Face folder, with its chat template if it has one."""
    found = checkpoint_path(path)
    if found.is_dir():
        return hugging_face_tokenizer(found)
    # Imported here, because the import would delay the start of every other process by a tenth of a second.
    from megatron_runtime.model.formats.gguf_file import GgufFile
    from megatron_runtime.model.tokenizer.gguf_tokenizer import gguf_tokenizer

    return gguf_tokenizer(GgufFile(found))
