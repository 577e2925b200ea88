"""Filters that change the logits of single tokens: bias, penalties, stop tokens and bad words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

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


class LogitBias(TokenFilter):
    """Adds a bias to the logits of given tokens."""

    parameters = ("logit_bias",)
    operation = Operation.ADD

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The request's biases."""
        biases = request.params.logit_bias
        return FixedEdit(biases) if biases else None


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
        excluded = {token: np.inf for token in request.stop_ids if 0 <= token < self.vocab_size}
        return FixedEdit(excluded, until=request.prompt_length + minimum) if minimum and excluded else None


class BadWords(TokenFilter):
    """Excludes the token that would complete a bad word in the answer."""

    parameters = ("bad_words",)
    operation = Operation.EXCLUDE

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The token sequences of the request's bad words."""
        possible = [tokens for tokens in request.bad_sequences if max(tokens) < self.vocab_size]
        return _BadWordsEdit(possible, request.prompt_length) if possible else None


class AllowedTokens(TokenFilter):
    """Excludes all tokens but the allowed ones."""

    parameters = ("allowed_token_ids",)
    operation = Operation.EXCLUDE

    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The tokens that the request does not allow."""
        allowed = request.params.allowed_token_ids
        if allowed is None:
            return None
        excluded = np.setdiff1d(np.arange(self.vocab_size), allowed, assume_unique=False)
        return FixedEdit(dict.fromkeys(excluded.tolist(), np.inf)) if len(excluded) else None


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
        excluded = np.delete(np.arange(self._vocab_size), forced)
        return excluded, np.full(len(excluded), np.inf, np.float32)


class _BadWordsEdit:
    """The last token of each sequence whose other tokens end the answer so far."""

    def __init__(self, sequences: Collection[tuple[int, ...]], prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._last_tokens: dict[tuple[int, ...], set[int]] = {}
        for *start, last in sequences:
            self._last_tokens.setdefault(tuple(start), set()).add(last)
        self._lengths = sorted({len(start) for start in self._last_tokens})

    def after(self, tokens: Sequence[int], length: int, num_drafts: int = 0) -> TokenValues:
        """As in RequestEdit."""
        del num_drafts
        excluded: set[int] = set()
        for size in self._lengths:
            if size > length - self._prompt_length:
                break
            excluded |= self._last_tokens.get(tuple(tokens[length - size : length]), set())
        return np.array(sorted(excluded), np.int64), np.full(len(excluded), np.inf, np.float32)


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
