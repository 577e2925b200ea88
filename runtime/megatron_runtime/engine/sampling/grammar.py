"""The tokens that the grammar of a request allows next."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.engine.sampling.compiled_grammars import compiled_grammars
from megatron_runtime.model.tokenizer import Tokenizer


class RequestGuide:
    """Follows the answer of one request through its grammar.

    The allowed tokens depend on the tokens of the answer only, so a request can continue on another engine.

    Args:
        grammar: A grammar that ``guides.check_grammar`` accepts.
        tokenizer: The model's. llguidance's representation of it is cached in it.
        prompt_length: Number of tokens of the sequence that are the prompt.
    """

    def __init__(self, grammar: str, tokenizer: Tokenizer, prompt_length: int) -> None:
        self._grammar = grammar
        self._grammars = compiled_grammars(tokenizer)
        self._start = self._grammars.start(grammar)
        """At the start of the grammar, whose memory its copies share."""
        self._first = self._known = prompt_length
        self._drafts: list[int] = []
        """The last of the known tokens, if they were drafts."""
        self._followed_drafts = False
        """Whether the last call of `after` had drafts, so that a failure may be due to them."""
        self.mask_milliseconds = 0
        """Time of the last call of `after`, rounded down."""
        self._matcher = self._start.deep_copy()

    @property
    def failure(self) -> str | None:
        """Why the grammar allows no next token although it is not complete; None if it allows one."""
        if not self._matcher.is_error():
            return None
        # The other lines are the whole state of the matcher.
        return (self._matcher.get_error().splitlines() or ["llguidance reported no reason"])[0]

    def after(self, tokens: Sequence[int], length: int, vocab_size: int, *, num_drafts: int = 0) -> NDArray[np.bool_]:
        """The tokens that may follow the first ``length`` tokens: bool [vocab_size]; none after a failure.

        The last ``num_drafts`` of these tokens are drafts. None may follow if the grammar does not allow a draft.
        """
        started = time.perf_counter()
        if self._followed_drafts and self._matcher.is_error():
            self._start_over()
            self._repeat(tokens, length - num_drafts)
        self._followed_drafts = num_drafts > 0
        self._forget_wrong_drafts(tokens, length)
        if length < self._known:
            self._start_over()  # The pass failed, and is repeated.
        bits = self._bits_after(tokens, length, num_drafts)
        for _ in range(2):  # The first may be one that others have nearly exhausted, the second is new.
            if self._has_exhausted_lexer:
                self._start = self._grammars.start(self._grammar, exhausted=self._start)
                self._start_over()
                bits = self._bits_after(tokens, length, num_drafts)
        allowed = np.zeros(vocab_size, np.bool_)
        if bits is not None:
            found = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(np.bool_)
            allowed[: len(found)] = found
        self.mask_milliseconds = int(1e3 * (time.perf_counter() - started))
        return allowed

    @property
    def _has_exhausted_lexer(self) -> bool:
        """Whether all answers of this grammar together have reached the limit of its states."""
        return (self.failure or "").startswith("lexer error: too many")

    def _bits_after(self, tokens: Sequence[int], length: int, num_drafts: int) -> NDArray[np.uint8] | None:
        """None if no token may follow."""
        is_possible = self._consume(list(tokens[self._known : length]), num_drafts)
        if self.failure is not None:
            return None
        # Also if a draft is not allowed: the error of an exhausted lexer, which allows none, appears only here.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return bits if is_possible else None

    def _consume(self, tokens: list[int], num_drafts: int) -> bool:
        """False if the grammar does not allow a draft."""
        if self._matcher.is_stopped():
            return True
        if not num_drafts:
            self._matcher.consume_tokens(tokens)
            self._known += len(tokens)
            self._drafts = []
            return True
        consumed = self._matcher.try_consume_tokens(tokens)
        self._known += consumed
        self._drafts += tokens[max(len(tokens) - num_drafts, 0) : consumed]
        return consumed == len(tokens)

    def _forget_wrong_drafts(self, tokens: Sequence[int], length: int) -> None:
        sure = self._known - len(self._drafts)
        right = 0
        while right < len(self._drafts) and sure + right < length and tokens[sure + right] == self._drafts[right]:
            right += 1
        if right < len(self._drafts):
            if self._matcher.is_error() or not self._matcher.rollback(len(self._drafts) - right):
                self._start_over()
                return
            self._known = sure + right
            del self._drafts[right:]

    def _repeat(self, tokens: Sequence[int], length: int) -> None:
        """Consume the first tokens, with a mask before the last one as without drafts: whether llguidance reaches its
        limits depends on that."""
        for end in (length - 1, length):
            self._consume(list(tokens[self._known : end]), 0)
            if not self._matcher.is_error():
                self._matcher.compute_bitmask()

    def _start_over(self) -> None:
        self._matcher = self._start.deep_copy()
        self._known = self._first
        self._drafts = []
