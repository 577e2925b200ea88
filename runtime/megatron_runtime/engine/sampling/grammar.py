"""The tokens that the grammar of a request allows next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class RequestGuide:
    """Follows the answer of one request through its grammar.

    The allowed tokens depend on the tokens of the answer only, so a request can continue on another engine.

    Args:
        grammar: A grammar that ``guides.check_grammar`` accepts.
        tokenizer: The model's. llguidance's representation of it is cached in it.
        prompt_length: Number of tokens of the sequence that are the prompt.
    """

    def __init__(self, grammar: str, tokenizer: Tokenizer, prompt_length: int) -> None:
        self._grammars = compiled_grammars(tokenizer)
        self._grammar = grammar
        self._first = self._known = prompt_length
        self._matcher = self._grammars.matcher(grammar)

    @property
    def failure(self) -> str | None:
        """Why the grammar allows no next token although it is not complete; None if it allows one."""
        if not self._matcher.is_error():
            return None
        # The other lines are the whole state of the matcher.
        return (self._matcher.get_error().splitlines() or ["llguidance reported no reason"])[0]

    def after(self, tokens: Sequence[int], length: int, vocab_size: int) -> NDArray[np.bool_]:
        """The tokens that may follow the first ``length`` tokens: bool [vocab_size]; none after a failure."""
        if length < self._known:
            self._start_over()  # The pass failed, and is repeated.
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(tokens[self._known : length]))
        self._known = length
        allowed = np.zeros(vocab_size, np.bool_)
        if self.failure is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(np.bool_)
            allowed[: len(found)] = found
        return allowed

    def _start_over(self) -> None:
        self._matcher = self._grammars.matcher(self._grammar)
        self._known = self._first


class CompiledGrammars:
    """Compiles grammars and keeps the last ones: a large one takes a tenth of a second, its copy microseconds, and
    the choices of a request, and often all requests of an application, have the same.

    Args:
        tokenizer: The model's.
        size: Number of grammars that are kept, of up to 4 MiB each.
    """

    def __init__(self, tokenizer: Tokenizer, size: int = 16) -> None:
        self._new = lru_cache(size)(partial(_new_matcher, _vocabulary(tokenizer)))

    def check(self, grammar: str) -> None:
        """Raises InvalidRequestError with llguidance's message for an unsupported grammar."""
        matcher = self._new(grammar)
        if matcher.is_error():
            raise InvalidRequestError(f"the grammar is not supported: {matcher.get_error()}", field="grammar")

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar."""
        return self._new(grammar).deep_copy()


def compiled_grammars(tokenizer: Tokenizer) -> CompiledGrammars:
    """Those of the tokenizer."""
    return tokenizer.kept("compiled grammars", lambda: CompiledGrammars(tokenizer))


def _new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher  # Imported here, because most services never use a grammar.

    from megatron_runtime.guides import LIMITS

    return LLMatcher(vocabulary, grammar, limits=LIMITS)


def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer.definition, eos_token=sorted(tokenizer.eos_token_ids))
