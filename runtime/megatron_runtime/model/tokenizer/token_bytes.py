"""The bytes of each token, for incremental detokenization."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend

from megatron_runtime.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Token ids to bytes for one tokenizer; each token is computed once.

    Two families exist: byte-level BPE (GPT-2's alphabet of 256 printable characters) and SentencePiece, where U+2581
    stands for a space and ``<0xNN>`` for a byte. Raises CheckpointError for other decoders.
    """

    def __init__(self, backend: Backend, location: str) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        decoder = backend.decoder
        # Only the decoder: the whole tokenizer would serialize its vocabulary too.
        steps = _decoder_steps(None if decoder is None else json.loads(decoder.__getstate__()))
        kinds = {step["type"] for step in steps}
        self.is_byte_level = "ByteLevel" in kinds
        """Whether each character of a token is a byte of text."""
        if not self.is_byte_level and not kinds & {"ByteFallback", "Metaspace"}:
            raise CheckpointError(
                f"{location}: decoder {sorted(kinds)} found, expected ByteLevel, ByteFallback or Metaspace. "
                "Choose a checkpoint whose tokenizer is byte-level BPE or SentencePiece BPE"
            )
        self.drops_first_space = any(_drops_first_space(step) for step in steps)
        """Whether the decoder strips a space at the start of a sequence."""

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._work_out(token_id)
        return found

    def _work_out(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            alphabet = byte_of_character()
            # A token with other characters was added as plain text.
            return bytes(alphabet[c] for c in token) if alphabet.keys() >= set(token) else token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"])
