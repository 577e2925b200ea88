"""The filters of the sampler, in the order in which they apply. A filter implements one or more sampling parameters."""

from __future__ import annotations

from megatron_runtime.engine.sampling.filters.grammar import GrammarFilter
from megatron_runtime.engine.sampling.filters.protocol import EditFilter, LogitsEdit
from megatron_runtime.engine.sampling.filters.token_edits import (
    AllowedTokens,
    BadWords,
    FrequencyAndPresencePenalty,
    LogitBias,
    MinTokens,
    RepetitionPenalty,
    ThinkingBudget,
)
from megatron_runtime.engine.sampling.filters.truncations import MinP, TopK, TopNSigma, TopP, Truncation

EDITS: tuple[type[EditFilter[LogitsEdit]], ...] = (
    LogitBias,
    RepetitionPenalty,
    FrequencyAndPresencePenalty,
    MinTokens,
    BadWords,
    AllowedTokens,
    ThinkingBudget,
    GrammarFilter,
)
"""Filters that change logits, before the temperature."""
TRUNCATIONS: tuple[type[Truncation], ...] = (TopNSigma, TopK, TopP, MinP)
"""Filters that keep the most likely tokens."""
