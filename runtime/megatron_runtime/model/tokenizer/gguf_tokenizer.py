"""The tokenizer in a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.gguf_file import GgufFile
from megatron_runtime.model.tokenizer.byte_level_bpe import PRE_TOKENIZERS, byte_level_bpe
from megatron_runtime.model.tokenizer.end_tokens import named_ends
from megatron_runtime.model.tokenizer.sentencepiece_bpe import sentencepiece_bpe
from megatron_runtime.model.tokenizer.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_CONVERT_AGAIN = "Convert the model again with a current converter"
_ELEMENT_TYPES = {"tokens": str, "merges": str, "token_type": int, "scores": float}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FILL_ENDS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
"""Tokens after which a model that fills in code begins another file; llama.cpp ends there too."""


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of ``file``. Raises CheckpointError if it has none, or one of an unknown kind."""
    tokens = _list(file, "tokens")
    types = _list(file, "token_type", optional=True) or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{file.path}: {_PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens. {_CONVERT_AGAIN}"
        )
    try:
        backend, adds_bos = _backend(file, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file.path}: its tokenizer can't be built ({error}). {_CONVERT_AGAIN}") from None
    control = [token_id for token_id, kind in enumerate(types) if kind == TokenType.CONTROL]
    named = named_ends({text: token_id for token_id, text in enumerate(tokens)}, control)
    for added in (TokenType.CONTROL, TokenType.USER_DEFINED):
        special = added == TokenType.CONTROL
        listed = [text for text, kind in zip(tokens, types, strict=True) if kind == added]
        if special:  # Some converters write the end of a turn as an ordinary token.
            listed += [tokens[token_id] for token_id in named if types[token_id] != added]
        (backend.add_special_tokens if special else backend.add_tokens)(
            [AddedToken(text, special=special, normalized=False) for text in listed]
        )
    ids = {name: _token_id(file, name, len(tokens)) for name in (*_ENDS, *_FILL_ENDS, "bos_token_id")}
    eod, bos = ids["eos_token_id"], ids["bos_token_id"]
    if eod is None:
        raise CheckpointError(f"{file.path}: {_PREFIX}eos_token_id is missing: nothing would end. {_CONVERT_AGAIN}")
    if bos is not None and file.metadata.get(_PREFIX + "add_bos_token", adds_bos):
        text = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(single=f"{text}:0 $A:0", special_tokens=[(text, bos)])
    return Tokenizer(
        backend,
        location=str(file.path),
        eod=eod,
        eos_token_ids=[*named, *(found for name in (*_ENDS, *_FILL_ENDS) if (found := ids[name]) is not None)],
        bos=bos,
        chat_templates=_chat_templates(file),
        special_tokens=_special_tokens(file, tokens),
    )


def _backend(file: GgufFile, tokens: list[str]) -> tuple[Backend, bool]:
    """The tokenizer, and whether its kind adds a beginning-of-text token unless the file says otherwise."""
    kind = file.metadata.get(_PREFIX + "model")
    if kind == "llama":
        scores = _list(file, "scores")
        return sentencepiece_bpe(tokens, scores, bool(file.metadata.get(_PREFIX + "add_space_prefix", True))), True
    if kind != "gpt2":
        raise CheckpointError(f"{file.path}: tokenizer model {kind!r} is not known; the known ones are gpt2 and llama")
    name = file.metadata.get(_PREFIX + "pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(f"{file.path}: pre-tokenizer {name!r} is not known; the known ones are {known}")
    return byte_level_bpe(tokens, _list(file, "merges"), PRE_TOKENIZERS[name]), PRE_TOKENIZERS[name].adds_bos


def _list(file: GgufFile, key: str, *, optional: bool = False) -> list[Any]:
    found = file.metadata.get(_PREFIX + key)
    if isinstance(found, list) and found:
        if isinstance(found[0], _ELEMENT_TYPES[key]):
            return found
        raise CheckpointError(
            f"{file.path}: {_PREFIX}{key} holds {type(found[0]).__name__}, expected {_ELEMENT_TYPES[key].__name__}. "
            f"{_CONVERT_AGAIN}"
        )
    if optional and found is None:
        return []
    raise CheckpointError(f"{file.path}: {_PREFIX}{key} is missing or empty, expected a tokenizer. {_CONVERT_AGAIN}")


def _token_id(file: GgufFile, name: str, num_tokens: int) -> int | None:
    found = file.metadata.get(_PREFIX + name)
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < num_tokens:
        raise CheckpointError(f"{file.path}: {_PREFIX}{name} is {found!r}, expected one of {num_tokens} tokens")
    return found


def _chat_templates(file: GgufFile) -> dict[str, str]:
    named = {
        key.removeprefix(_TEMPLATE + "."): value
        for key, value in file.metadata.items()
        if key.startswith(_TEMPLATE + ".") and isinstance(value, str)
    }
    if isinstance(default := file.metadata.get(_TEMPLATE), str):
        named["default"] = default
    return named


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    ids = {name: _token_id(file, key, len(tokens)) for name, key in names.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
