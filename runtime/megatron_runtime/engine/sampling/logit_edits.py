"""Penalties, biases and forbidden tokens: changes of single logits before sampling."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.sampling_params import SamplingParams

_BIAS, _REPETITION, _LESS = range(3)
_NO_CHANGE = 0.0, 1.0, 0.0
_FIRST_CAPACITY = 64


@dataclass(frozen=True)
class LogitEdits:
    """N changes to the logits of a batch, at most one for each row and token.

    A logit gets the bias, is then divided by the repetition penalty where it is positive and multiplied with it where
    it is not (Keskar et al. 2019), and is lowered last.
    """

    rows: NDArray[np.int64]
    """[N], rows of the logits."""
    tokens: NDArray[np.int64]
    """[N]."""
    values: NDArray[np.float32]
    """[3, N]: bias, repetition penalty, and what to subtract; infinity forbids a token."""

    def apply_(self, logits: Tensor) -> None:
        """Change the logits, [S, vocab], in place."""
        places = torch.from_numpy(self.rows).to(logits.device), torch.from_numpy(self.tokens).to(logits.device)
        bias, repetition, less = torch.from_numpy(self.values).to(logits)
        edited = logits[places] + bias
        edited = torch.where(edited > 0, edited / repetition, edited * repetition)
        logits[places] = edited - less


class RequestEdits:
    """The changes of one request's logits, updated at a cost that depends on new tokens alone.

    Args:
        params: With ``edits_logits``.
        prompt_length: How many of the sequence's tokens are the prompt.
        stop_ids: Tokens that end the answer.
        vocab_size: Stop tokens from here on are ignored.
    """

    def __init__(self, params: SamplingParams, prompt_length: int, stop_ids: Collection[int], vocab_size: int) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._has_penalties = self._repetition != 1 or self._frequency != 0 or self._presence != 0
        self._prompt_length = prompt_length
        self._free_from = prompt_length + params.min_tokens
        self._biases = params.logit_bias or {}
        self._stop_ids = [token for token in stop_ids if 0 <= token < vocab_size] if params.min_tokens else []
        self._start_over()

    def _start_over(self) -> None:
        self._forbidden = self._stop_ids
        self._slots: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._num_known = 0
        self._tokens = np.empty(_FIRST_CAPACITY, np.int64)
        self._values = np.empty((3, _FIRST_CAPACITY), np.float32)
        for token, bias in self._biases.items():
            self._set(_BIAS, token, bias)
        for token in self._forbidden:
            self._set(_LESS, token, np.inf)

    def after(self, tokens: Sequence[int], length: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The changes for the token after the sequence's first ``length``.

        Returns:
            Tokens [n], and values [3, n] as in LogitEdits.
        """
        if length < self._num_known:
            self._start_over()  # a pass failed and is repeated
        self._catch_up(tokens, length)
        size = len(self._slots)
        return self._tokens[:size].copy(), self._values[:, :size].copy()

    def _catch_up(self, tokens: Sequence[int], length: int) -> None:
        known, self._num_known = self._num_known, length
        if self._has_penalties:
            if known < self._prompt_length and self._repetition != 1:
                for token in set(tokens[known : min(length, self._prompt_length)]):
                    self._set(_REPETITION, token, self._repetition)
            for token in tokens[max(known, self._prompt_length) : length]:
                self._counts[token] = self._counts.get(token, 0) + 1
                self._set(_REPETITION, token, self._repetition)
                self._lower(token)
        if self._forbidden and length >= self._free_from:
            freed, self._forbidden = self._forbidden, []
            for token in freed:
                self._lower(token)

    def _lower(self, token: int) -> None:
        """Update what is subtracted from the token's logit."""
        count = self._counts.get(token, 0)
        less = self._presence * (count > 0) + self._frequency * count
        self._set(_LESS, token, np.inf if token in self._forbidden else less)

    def _set(self, kind: int, token: int, value: float) -> None:
        slot = self._slot(token)  # may move the values
        self._values[kind, slot] = value

    def _slot(self, token: int) -> int:
        """The token's column of the values; a new one changes nothing yet."""
        known = self._slots.get(token)
        if known is not None:
            return known
        slot = self._slots[token] = len(self._slots)
        if slot == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
            self._values = np.concatenate((self._values, np.empty_like(self._values)), axis=1)
        self._tokens[slot] = token
        self._values[:, slot] = _NO_CHANGE
        return slot


def merged(edits: Sequence[tuple[int, NDArray[np.int64], NDArray[np.float32]]]) -> LogitEdits | None:
    """The edits of a batch from those of its rows: row, tokens and values; None if there are none."""
    sizes = [len(tokens) for _, tokens, _ in edits]
    if not any(sizes):
        return None
    return LogitEdits(
        rows=np.repeat(np.array([row for row, _, _ in edits], np.int64), sizes),
        tokens=np.concatenate([tokens for _, tokens, _ in edits]),
        values=np.concatenate([values for _, _, values in edits], axis=1),
    )
