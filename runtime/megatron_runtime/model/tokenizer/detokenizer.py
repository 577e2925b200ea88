"""Text from tokens as they come."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable

from megatron_runtime.model.tokenizer.token_bytes import TokenBytes


class IncrementalDetokenizer:
    """The text of one growing sequence; constant work per token, and never half a character.

    The pieces joined are what the whole sequence detokenizes to. Bytes that can't become a character show as U+FFFD.
    """

    def __init__(self, token_bytes: TokenBytes, skipped: Container[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = token_bytes.drops_first_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; what begins a character is held back until it is whole."""
        return self._emit(b"".join(self._token_bytes[i] for i in ids if i not in self._skipped), final=False)

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that was never completed, else nothing."""
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
