"""Ends the reasoning of an answer at a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_runtime.model.tokenizer import Tokenizer


class ThinkingLimit:
    """Follows the reasoning of one answer, and forces its end marker once the budget is spent.

    The forced tokens depend on the tokens of the answer only, so a request can continue on another engine.

    Args:
        tokenizer: The model's.
        prompt_length: Number of tokens of the sequence that are the prompt.
        budget: Most tokens of the reasoning, without its markers.
        begin: The marker that begins the reasoning; empty if the answer begins with reasoning.
        end: The marker that ends it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_length: int, *, budget: int, begin: str, end: str) -> None:
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self._budget = budget
        self._begin = begin.encode()
        self._end = end.encode()
        self._end_tokens = tokenizer.tokenize(end)
        self._restart()

    def _restart(self) -> None:
        self._known = self._prompt_length
        self._text = bytearray()  # up to the begin marker all text, afterwards what the end marker may be part of
        self._num_thoughts: int | None = None if self._begin else 0
        self._is_over = False

    def forced(self, tokens: Sequence[int], length: int) -> int | None:
        """The token that has to follow the first ``length`` tokens; None if the model chooses."""
        if length < self._known:
            self._restart()  # The pass failed, and is repeated.
        for token in tokens[self._known : length]:
            self._read(token)
        self._known = length
        if self._is_over or self._num_thoughts is None or self._num_thoughts < self._budget:
            return None
        return self._end_tokens[self._num_thoughts - self._budget]

    def _read(self, token: int) -> None:
        if self._is_over:
            return
        self._text += self._tokenizer.token_bytes(token)
        if self._num_thoughts is None:
            self._find_begin()
            return
        self._num_thoughts += 1
        if self._end in self._text or self._num_thoughts == self._budget + len(self._end_tokens):
            self._is_over = True
        elif len(self._text) > len(self._end):
            del self._text[: len(self._text) - len(self._end)]

    def _find_begin(self) -> None:
        start = self._text.lstrip()
        if start.startswith(self._begin):
            self._num_thoughts = 0
            self._text = start[len(self._begin) :]
        elif not self._begin.startswith(start):
            self._is_over = True  # The answer has no reasoning.
