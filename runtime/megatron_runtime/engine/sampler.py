"""Choosing tokens from logits, for a whole batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.noise import delays

NO_TOKEN = -1
"""Stands for a token that can't be chosen, since the logits are not finite."""

_NUCLEUS_WIDTHS = (256, 4096)
_NUMBERS_AT_ONCE = 1 << 20
"""Of the vocabulary's noise, so that it is made and used within the processor's cache."""


@dataclass(frozen=True)
class SamplingRules:
    """How each of S rows is sampled."""

    temperature: NDArray[np.float32]
    """[S]; 0 takes the likeliest token."""
    top_k: NDArray[np.int32]
    """[S]; 0 means all."""
    top_p: NDArray[np.float32]
    """[S]; 0 and 1 mean all."""
    min_p: NDArray[np.float32]
    """[S]; 0 means all."""
    keys: NDArray[np.uint64]
    """[S], as from noise_keys."""

    def take(self, rows: NDArray[np.intp]) -> SamplingRules:
        """The rules of some rows."""
        return SamplingRules(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows]
        )


def sample(logits: Tensor, rules: SamplingRules) -> Tensor:
    """Choose one token per row.

    Args:
        logits: float32 [S, vocab].
        rules: One rule per row.

    Returns:
        int64 [S]; NO_TOKEN where the row has a NaN or no finite maximum.
    """
    highest, tokens = logits.max(dim=-1)
    noisy = np.flatnonzero((rules.temperature > 0) & (rules.top_k != 1))
    if noisy.size:
        rows = torch.from_numpy(noisy).to(logits.device)
        # Shifted so that the highest is 0: no temperature can make it overflow, and min-p becomes a threshold.
        shifted = logits[rows] - highest[rows, None]
        tokens[rows] = _draw(shifted, rules.take(noisy))
    return tokens.masked_fill_(~highest.isfinite(), NO_TOKEN)


def _draw(shifted: Tensor, rules: SamplingRules) -> Tensor:
    """Sample rows whose highest logit is 0: filter, then let the remaining tokens race."""
    scaled = shifted / _column(rules.temperature, shifted)
    if (rules.top_k > 0).any():
        scaled = _filter_top_k(scaled, rules.top_k)
    nucleus = np.flatnonzero((rules.top_p > 0) & (rules.top_p < 1))
    if nucleus.size:
        rows = torch.from_numpy(nucleus).to(scaled.device)
        scaled[rows] = _filter_top_p(scaled[rows], _column(rules.top_p[nucleus], scaled))
    if (rules.min_p > 0).any():
        least = _column(rules.min_p, scaled).log()
        scaled = torch.where(scaled < least, -torch.inf, scaled)
    return _race(scaled, rules.keys)


def _race(scaled: Tensor, keys: NDArray[np.uint64]) -> Tensor:
    """The token of each row whose delay is the smallest in proportion to its probability: int64 [S]."""
    vocabulary = scaled.shape[1]
    rows = max(1, _NUMBERS_AT_ONCE // vocabulary)
    winners = []
    for start in range(0, len(keys), rows):
        part = slice(start, start + rows)
        delay = delays(keys[part], vocabulary, scaled.device)
        winners.append((scaled[part] - delay.log_()).argmax(dim=-1))
    return torch.cat(winners)


def _filter_top_k(scaled: Tensor, top_k: NDArray[np.int32]) -> Tensor:
    wanted = np.where(top_k > 0, np.minimum(top_k, scaled.shape[1]), 1)
    best = scaled.topk(int(wanted.max()), dim=-1).values
    least = best.gather(1, torch.from_numpy(wanted.astype(np.int64) - 1).to(scaled.device)[:, None])
    least = least.masked_fill(torch.from_numpy(top_k <= 0).to(scaled.device)[:, None], -torch.inf)
    return torch.where(scaled < least, -torch.inf, scaled)


def _filter_top_p(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Keep the likeliest tokens up to and with the one that brings their sum to top_p.

    Nearly always a few hundred tokens reach it. Sorting the whole vocabulary costs as much as a small model's pass, so
    only the rows that need more candidates get them.
    """
    normalizer = scaled.logsumexp(dim=-1, keepdim=True)
    least = torch.empty_like(top_p)
    open_rows = torch.arange(len(scaled), device=scaled.device)
    vocabulary = scaled.shape[1]
    for width in (*(width for width in _NUCLEUS_WIDTHS if width < vocabulary), vocabulary):
        wanted = top_p[open_rows]
        best = scaled[open_rows].topk(width, dim=-1).values
        mass = (best - normalizer[open_rows]).exp_().cumsum(dim=-1)
        last_kept = (mass < wanted).sum(dim=-1, keepdim=True).clamp_(max=width - 1)
        least[open_rows] = best.gather(1, last_kept)
        open_rows = open_rows[(mass[:, -1:] < wanted).squeeze(1)]
        if not len(open_rows):
            break
    return torch.where(scaled < least, -torch.inf, scaled)


def _column(values: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like)[:, None]
