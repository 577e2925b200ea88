"""Samples the tokens of a whole batch from its logits."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.gpu_sampler import GpuSampler, has_gpu_sampler
from megatron_runtime.engine.sampling.gumbel_max import gumbel_max, gumbel_max_among
from megatron_runtime.engine.sampling.penalties import PenaltyTable
from megatron_runtime.engine.sampling.sampling_table import SamplingRules, SamplingTable
from megatron_runtime.engine.sampling.top_k import row_max
from megatron_runtime.engine.sampling.truncation import least_kept, truncate
from megatron_runtime.model.device_memory import naming_device_memory

NO_TOKEN = -1
"""Marks a row whose logits are not finite."""


class TokenSampler(Protocol):
    """Samples a batch of S rows by its sampling rules, on the device of its logits."""

    def edit_(self, logits: Tensor) -> None:
        """Apply the edits to the logits, float32 [S, vocab] and contiguous, in place."""

    def sample(self, logits: Tensor) -> Tensor:
        """As the function `sample`."""


class Sampler(TokenSampler, Protocol):
    """The same, with the distribution that it samples from."""

    def processed_log_probs(self, logits: Tensor) -> Tensor:
        """As the function `processed_log_probs`."""


def make_sampling_table(num_rows: int, vocab_size: int, longest: int, device: torch.device) -> SamplingTable:
    """For samplers of logits on this device, and sequences of up to ``longest`` tokens.

    Raises:
        ConfigurationError: The device has too little memory.
    """
    if not has_gpu_sampler(device):
        return SamplingTable(num_rows, vocab_size)
    with naming_device_memory("for the tokens of penalized requests", device):
        return SamplingTable(num_rows, vocab_size, PenaltyTable(num_rows, longest, device))


def make_sampler(rules: SamplingRules, vocab_size: int, device: torch.device) -> Sampler:
    """The sampler for logits of ``vocab_size`` columns on this device."""
    return GpuSampler(rules, vocab_size, device) if has_gpu_sampler(device) else TorchSampler(rules)


class TorchSampler:
    """Samples with PyTorch's operators, on any device. Only on a CPU they know results without waiting."""

    def __init__(self, rules: SamplingRules) -> None:
        self._rules = rules

    def edit_(self, logits: Tensor) -> None:
        """As in Sampler."""
        self._rules.edit_(logits)

    def sample(self, logits: Tensor) -> Tensor:
        """As in Sampler."""
        return sample(logits, self._rules)

    def processed_log_probs(self, logits: Tensor) -> Tensor:
        """As in Sampler."""
        return processed_log_probs(logits, self._rules)


def sample(logits: Tensor, rules: SamplingRules) -> Tensor:
    """Sample one token per row.

    Args:
        logits: float32 [S, vocab], after the rules' edits.
        rules: One rule per row.

    Returns:
        int64 [S]; NO_TOKEN where the row has a NaN or no finite maximum.
    """
    top, tokens = row_max(logits)
    finite = top.isfinite()
    # A GPU that samples greedy rows only is not waited for.
    if rules.is_stochastic.any():
        stochastic = np.flatnonzero(rules.is_stochastic & finite.cpu().numpy())
        if stochastic.size:
            _sample_stochastic(logits, top, rules, stochastic, tokens)
    return tokens.masked_fill_(~finite, NO_TOKEN)


def _sample_stochastic(
    logits: Tensor, top: Tensor, rules: SamplingRules, stochastic: NDArray[np.intp], tokens: Tensor
) -> None:
    """Sample tokens [S] of some rows, in place."""
    ranked = rules.ranks[stochastic]
    unranked = stochastic[~ranked]
    if unranked.size:
        rows = torch.from_numpy(unranked).to(logits.device)
        tokens[rows] = gumbel_max(
            logits,
            rules.keys[unranked],
            rows=rows,
            top=top[rows],
            temperature=torch.from_numpy(rules.temperature[unranked]).to(logits),
            least=least_kept(logits, top, rules, unranked),
        )
    if unranked.size == stochastic.size:
        return
    for kept in truncate(logits, top, rules, stochastic[ranked]):
        keys = rules.keys[kept.rows]
        if kept.columns is None:
            sampled = gumbel_max(kept.scaled, keys)
        else:
            sampled = gumbel_max_among(kept.scaled, kept.columns, keys)
        tokens[torch.from_numpy(kept.rows).to(logits.device)] = sampled


def processed_log_probs(logits: Tensor, rules: SamplingRules) -> Tensor:
    """The log probabilities of the sampled distribution: float32 [S, vocab], -inf for excluded tokens.

    Greedy rows get the log probabilities at temperature 1 without filters, because a distribution over one token
    carries no information.

    Args:
        logits: float32 [S, vocab], after the rules' edits.
        rules: One rule per row.
    """
    top, _ = row_max(logits)
    stochastic = np.flatnonzero(rules.is_stochastic & top.isfinite().cpu().numpy())
    processed = logits.clone()
    for kept in truncate(logits, top, rules, stochastic):
        rows = torch.from_numpy(kept.rows).to(logits.device)
        scaled = kept.scaled
        if kept.columns is not None:
            scaled = torch.full_like(logits[rows], -torch.inf).scatter_(1, kept.columns, scaled)
        processed[rows] = scaled
    return processed.log_softmax(dim=-1)
