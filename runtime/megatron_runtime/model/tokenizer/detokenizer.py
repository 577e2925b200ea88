"""Incremental detokenization."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable

from megatron_runtime.model.tokenizer.token_bytes import TokenBytes


class IncrementalDetokenizer:
    """The text of one growing sequence, with constant work per token and without partial characters.

    The joined results are the text of the whole sequence. Bytes that are no valid character become U+FFFD.
    """

    def __init__(self, token_bytes: TokenBytes, skipped: Container[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = token_bytes.drops_first_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; an incomplete character is held back."""
        return self._emit(b"".join(self._token_bytes[i] for i in ids if i not in self._skipped), final=False)

    def flush(self) -> str:
        """The end of the text: U+FFFD for an incomplete character, else empty."""
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
