"""A byte-level tokenizer, for artificial models."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_runtime.model.tokenizer.token_bytes import byte_of_character

END = 256
"""The token that ends an answer; every other one is a byte."""
END_TEXT = "<end>"


def byte_backend(marks: Sequence[str] = ()) -> Tokenizer:
    """Every byte is a token; 256 is the end of text; ``marks`` are special tokens after it."""
    backend = Tokenizer(models.BPE(byte_of_character(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (END_TEXT, *marks)])
    return backend
