"""The model and tokenizer of an engine, from a live model of Megatron Core."""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.megatron.sharing import is_megatron_model, share_model
from megatron_runtime.model.tokenizer import Tokenizer, load_tokenizer


def from_megatron(model: nn.Module, tokenizer: Any) -> tuple[Decoder, Tokenizer]:
    """The model and tokenizer for an LLM of this library, from a live GPTModel of Megatron Core.

    The decoder uses the GPTModel's weights in place: if training changes them, the results change too. Call
    ``update_weights`` with the GPTModel, or ``invalidate_prefix_cache`` of the engine, after each change.

    Args:
        model: The GPTModel, or a wrapper of it, on one rank.
        tokenizer: A tokenizer of Megatron or transformers in its fast form, the path of one, or a `Tokenizer`.

    Raises:
        ConfigurationError: The model is not a GPTModel, has several ranks, or has a feature that the decoder does not
            implement; or the tokenizer can't be read.
        CheckpointError: A tensor of the model is missing or unknown; the message names it.
    """
    if not is_megatron_model(model):
        raise ConfigurationError(
            f"model is a {type(model).__name__}; give a GPTModel of Megatron Core, or the result of load_model",
            field="model",
        )
    readable = readable_tokenizer(tokenizer)
    return share_model(model, readable.vocab_size), readable


def readable_tokenizer(given: Any) -> Tokenizer:
    """The tokenizer as frontends read it: from files. Arguments and errors as for `from_megatron`."""
    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, str | Path):
        return load_tokenizer(given)
    # Frontends are separate processes, which read the tokenizer from files.
    folder = tempfile.TemporaryDirectory(prefix="megatron-tokenizer-")
    try:
        given.save_pretrained(folder.name)
        Path(folder.name, "config.json").write_text("{}")  # Marks the folder as a checkpoint.
        tokenizer = load_tokenizer(folder.name)
    except (AttributeError, ValueError, CheckpointError) as error:
        raise ConfigurationError(
            f"tokenizer is a {type(given).__name__} that can't be saved in its fast form ({error}); give the path of a "
            "folder with a tokenizer.json",
            field="tokenizer",
        ) from error
    weakref.finalize(tokenizer, folder.cleanup)
    return tokenizer
