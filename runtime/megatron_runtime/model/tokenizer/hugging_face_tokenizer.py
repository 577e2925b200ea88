"""The tokenizer in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.config_fields import read_json
from megatron_runtime.model.tokenizer.tokenizer import Tokenizer

_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.json")
"""Files of tokenizers in forms that only transformers reads."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def hugging_face_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of ``folder``: tokenizer.json, with names and templates from the other files."""
    path = folder / "tokenizer.json"
    if not path.exists():
        for other in _OTHER_TOKENIZERS:
            if (folder / other).exists():
                raise CheckpointError(
                    f"{folder}: has {other} alone, which isn't read. Write a tokenizer.json beside it, with "
                    f"transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
                )
        raise CheckpointError(f"{path}: does not exist. Fetch the tokenizer of the model into this folder")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: can't be read as a tokenizer ({error}). Fetch the file again") from None
    settings = _read_if_present(folder / "tokenizer_config.json")
    special = _special_tokens(settings)
    _make_special(backend, special)
    ends = list(_end_token_ids(folder, backend, special))
    if not ends:
        raise CheckpointError(
            f"{folder}: no end-of-text token found: nothing would end. Name it as eos_token in tokenizer_config.json"
        )
    return Tokenizer(
        backend,
        location=str(folder),
        eod=ends[0],
        eos_token_ids=ends,
        bos=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        chat_templates=_chat_templates(folder, settings),
        special_tokens=special,
    )


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Names to text. A token is stored as its text, or as an object with its text as ``content``."""
    found = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _make_special(backend: Backend, special: dict[str, str]) -> None:
    """Mark the named tokens as special, if only tokenizer_config.json does so."""
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [text for text in special.values() if text not in known and backend.token_to_id(text) is not None]
    )


def _end_token_ids(folder: Path, backend: Backend, special: dict[str, str]) -> Iterator[int]:
    """Every token that ends a generation, the tokenizer's own first."""
    if "eos_token" in special and (token_id := backend.token_to_id(special["eos_token"])) is not None:
        yield token_id
    for name in ("generation_config.json", "config.json"):
        found = _read_if_present(folder / name).get("eos_token_id")
        if found is not None:
            yield from (token_id for token_id in (found if isinstance(found, list) else [found]))
            return


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Sources by name; chat_template.jinja and additional_chat_templates/ precede tokenizer_config.json."""
    named: dict[str, str] = {}
    match settings.get("chat_template"):
        case str(source):
            named["default"] = source
        case list(entries):
            named |= {entry["name"]: entry["template"] for entry in entries}
    if (single := folder / "chat_template.jinja").exists():
        named["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = path.read_text(encoding="utf-8")
    return named
