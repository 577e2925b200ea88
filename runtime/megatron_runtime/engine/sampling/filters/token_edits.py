"""Filters that change the logits of single tokens: bias, penalties, stop tokens and bad words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.engine.sampling.filters.protocol import FilterRequest
from megatron_runtime.engine.sampling.filters.token_filter import (
    NO_VALUES,
    FixedEdit,
    GrowingEdit,
    Operation,
    RequestEdit,
    TokenFilter,
    TokenValues,
)
from megatron_runtime.engine.sampling.thinking import ThinkingLimit
from megatron_runtime.engine.shared_values import SharedValues


class LogitBias(TokenFilter):
    """Adds a bias to the logits of given tokens."""

    parameters = ("logit_bias",)
    operation = Operation.ADD

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The request's biases."""
        biases = request.params.logit_bias
        return _biases(tuple(biases.items())) if biases else None


class RepetitionPenalty(TokenFilter):
    """Lowers the logits of tokens that occur in prompt or answer.

    Positive logits are divided by the penalty, others are multiplied by it (Keskar et al. 2019).
    """

    parameters = ("repetition_penalty",)
    operation = Operation.PENALIZE

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The request's penalty."""
        penalty = request.params.repetition_penalty
        return _RepetitionEdit(penalty) if penalty != 1 else None


class FrequencyAndPresencePenalty(TokenFilter):
    """Lowers the logits of tokens that occur in the answer, by their count and by their presence.

    One filter applies both penalties, so that they are added before they are rounded to float32.
    """

    parameters = ("frequency_penalty", "presence_penalty")
    operation = Operation.SUBTRACT

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The request's penalties."""
        frequency, presence = request.params.frequency_penalty, request.params.presence_penalty
        return _CountEdit(frequency, presence, request.prompt_length) if frequency or presence else None


class MinTokens(TokenFilter):
    """Excludes the tokens that end the answer until the answer has its minimum number of tokens."""

    parameters = ("min_tokens",)
    operation = Operation.EXCLUDE

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The request's stop tokens, until the minimum length."""
        minimum = request.params.min_tokens
        excluded = [token for token in request.stop_ids if 0 <= token < self.vocab_size] if minimum else []
        if not excluded:
            return None
        return FixedEdit(_excluding(np.array(excluded, np.int64)), until=request.prompt_length + minimum)


class BadWords(TokenFilter):
    """Excludes the token that would complete a bad word in the answer."""

    parameters = ("bad_words",)
    operation = Operation.EXCLUDE

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The token sequences of the request's bad words."""
        last_tokens = _last_tokens(frozenset(request.bad_sequences), self.vocab_size)
        return _BadWordsEdit(last_tokens, request.prompt_length) if last_tokens.lengths else None


class AllowedTokens(TokenFilter):
    """Excludes all tokens but the allowed ones."""

    parameters = ("allowed_token_ids",)
    operation = Operation.EXCLUDE

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The tokens that the request does not allow."""
        allowed = request.params.allowed_token_ids
        if allowed is None:
            return None
        return _exclusion_of_others(tuple(allowed), self.vocab_size)


class ThinkingBudget(TokenFilter):
    """Excludes all tokens but the next one of the end marker once the budget of the reasoning is spent."""

    parameters = ("thinking_token_budget",)
    operation = Operation.EXCLUDE

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The request's limit."""
        return None if request.thinking is None else _ForcedTokens(request.thinking, self.vocab_size)


class _ForcedTokens:
    """All tokens but the forced one, where there is one."""

    def __init__(self, thinking: ThinkingLimit, vocab_size: int) -> None:
        self._thinking = thinking
        self._vocab_size = vocab_size

    def after(self, tokens: Sequence[int], length: int, num_drafts: int = 0) -> TokenValues:
        """As in RequestEdit."""
        del num_drafts
        forced = self._thinking.forced(tokens, length)
        if forced is None:
            return NO_VALUES
        return _excluding(np.delete(np.arange(self._vocab_size), forced))


class _LastTokens:
    """The last tokens of sequences by the tokens before them; without sequences beyond the vocabulary."""

    def __init__(self, sequences: frozenset[tuple[int, ...]], vocab_size: int) -> None:
        self.by_start: dict[tuple[int, ...], set[int]] = {}
        for *start, last in sequences:
            if max(last, *start, 0) < vocab_size:
                self.by_start.setdefault(tuple(start), set()).add(last)
        self.lengths = sorted({len(start) for start in self.by_start})


_last_tokens = SharedValues(_LastTokens)


class _BadWordsEdit:
    """The last token of each sequence whose other tokens end the answer so far."""

    def __init__(self, last_tokens: _LastTokens, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._last_tokens = last_tokens

    def after(self, tokens: Sequence[int], length: int, num_drafts: int = 0) -> TokenValues:
        """As in RequestEdit."""
        del num_drafts
        excluded: set[int] = set()
        for size in self._last_tokens.lengths:
            if size > length - self._prompt_length:
                break
            excluded |= self._last_tokens.by_start.get(tuple(tokens[length - size : length]), set())
        return _excluding(np.array(sorted(excluded), np.int64)) if excluded else NO_VALUES


class _RepetitionEdit(GrowingEdit):
    """The same penalty for every token of the sequence."""

    def __init__(self, penalty: float) -> None:
        super().__init__()
        self._penalty = penalty

    def changes(self, tokens: Sequence[int], start: int, end: int, *, are_drafts: bool = False) -> dict[int, float]:
        """As in GrowingEdit."""
        del are_drafts
        return dict.fromkeys(tokens[start:end], self._penalty)


class _CountEdit(GrowingEdit):
    """A penalty that grows with a token's count in the answer."""

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self._frequency = frequency
        self._presence = presence
        self._prompt_length = prompt_length
        super().__init__()

    def _restart(self) -> None:
        super()._restart()
        self._counts: dict[int, int] = {}

    def changes(self, tokens: Sequence[int], start: int, end: int, *, are_drafts: bool = False) -> dict[int, float]:
        """As in GrowingEdit."""
        counts: dict[int, int] = {}
        for token in tokens[max(start, self._prompt_length) : end]:
            counts[token] = counts.get(token, self._counts.get(token, 0)) + 1
        if not are_drafts:
            self._counts |= counts
        return {token: self._presence + self._frequency * count for token, count in counts.items()}


def _excluding(tokens: NDArray[np.int64]) -> TokenValues:
    return tokens, np.full(len(tokens), np.inf, np.float32)


def _edit_of_biases(biases: tuple[tuple[int, float], ...]) -> FixedEdit:
    tokens, values = zip(*biases, strict=True)
    return FixedEdit((np.array(tokens, np.int64), np.array(values, np.float32)))


def _excluding_others(allowed: tuple[int, ...], vocab_size: int) -> FixedEdit:
    is_excluded = np.ones(vocab_size, np.bool_)
    given = np.array(allowed, np.int64)
    is_excluded[given[given < vocab_size]] = False
    return FixedEdit(_excluding(np.flatnonzero(is_excluded)))


_biases = SharedValues(_edit_of_biases)
_exclusion_of_others = SharedValues(_excluding_others)
