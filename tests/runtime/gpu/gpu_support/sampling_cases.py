"""Random logits, and rules for sampling with all kinds of edits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.engine.sampling.filters.grammar import GrammarMask
from megatron_runtime.engine.sampling.filters.protocol import LogitsEdit
from megatron_runtime.engine.sampling.filters.token_edits import (
    AllowedTokens,
    BadWords,
    FrequencyAndPresencePenalty,
    LogitBias,
    MinTokens,
    RepetitionPenalty,
)
from megatron_runtime.engine.sampling.filters.token_filter import TokenEdits, TokenFilter
from megatron_runtime.engine.sampling.sampling_table import SamplingRules


def random_logits(rows: int, vocabulary: int) -> Tensor:
    """Of a spread as those of models."""
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


def logits_that_are_not_finite(vocabulary: int) -> Tensor:
    """Six rows: with a NaN at the end and at the beginning, with infinity, without a possible token, and two others."""
    logits = random_logits(6, vocabulary)
    logits[0, -1] = logits[1, 3] = torch.nan
    logits[2, 4] = torch.inf
    logits[3] = -torch.inf
    return logits


def rules_for(rows: int, temperature: float = 1.0, **parts: Any) -> SamplingRules:
    """The same temperature for all rows, and a seed for each."""
    keys = noise_keys(np.arange(rows, dtype=np.uint64) + 100, np.full(rows, 7))
    return SamplingRules(np.full(rows, temperature, np.float32), keys, **parts)


def values(*given: float) -> NDArray[np.float32]:
    """The parameter of each row."""
    return np.array(given, np.float32)


def edits_of(vocabulary: int) -> tuple[LogitsEdit, ...]:
    """For two rows: the same token in several filters, exclusions as lists and, of many tokens, as masks."""

    def edits(kind: type[TokenFilter], row: int, given: dict[int, float]) -> TokenEdits:
        return TokenEdits([(row, (np.array([*given]), values(*given.values())))], vocabulary, kind)

    allowed = np.arange(vocabulary)[None] % 3 == 1
    return (
        edits(LogitBias, 0, {5: 4.0, 40: -1.5, vocabulary - 1: 9.0}),
        edits(RepetitionPenalty, 0, {5: 1.5, 6: 0.5}),
        edits(FrequencyAndPresencePenalty, 0, {5: 0.25, 40: -0.5}),
        edits(MinTokens, 0, {31: np.inf, 32: np.inf}),
        edits(BadWords, 0, {32: np.inf, vocabulary - 2: np.inf}),
        edits(AllowedTokens, 0, dict.fromkeys(range(vocabulary // 2, vocabulary), np.inf)),
        GrammarMask(np.array([1]), allowed),
    )
