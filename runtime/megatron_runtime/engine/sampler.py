"""Choosing tokens from logits, for a whole batch at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.candidates import Candidates, candidates
from megatron_runtime.engine.likeliest import highest
from megatron_runtime.engine.noise import delays, delays_of
from megatron_runtime.engine.sampling_rules import SamplingRules

NO_TOKEN = -1
"""Stands for a token that can't be chosen, since the logits are not finite."""


def sample(logits: Tensor, rules: SamplingRules) -> Tensor:
    """Choose one token per row.

    Args:
        logits: float32 [S, vocab], with the rules' edits done.
        rules: One rule per row.

    Returns:
        int64 [S]; NO_TOKEN where the row has a NaN or no finite maximum.
    """
    top, tokens = highest(logits)
    finite = top.isfinite()
    noisy = np.flatnonzero(rules.is_noisy & finite.cpu().numpy())
    for found in candidates(logits, top, rules, noisy):
        tokens[torch.from_numpy(found.rows).to(logits.device)] = _race(found, rules.keys[found.rows])
    return tokens.masked_fill_(~finite, NO_TOKEN)


def processed_log_probs(logits: Tensor, rules: SamplingRules) -> Tensor:
    """The log probabilities that the tokens are drawn with: float32 [S, vocab], -inf for what is ruled out.

    Where the likeliest token is always taken, they are those of temperature 1 without filters: a distribution that is
    a single token tells nothing.

    Args:
        logits: float32 [S, vocab], with the rules' edits done.
        rules: One rule per row.
    """
    top, _ = highest(logits)
    noisy = np.flatnonzero(rules.is_noisy & top.isfinite().cpu().numpy())
    processed = logits.clone()
    for found in candidates(logits, top, rules, noisy):
        rows = torch.from_numpy(found.rows).to(logits.device)
        left = found.scaled
        if found.columns is not None:
            left = torch.full_like(logits[rows], -torch.inf).scatter_(1, found.columns, left)
        processed[rows] = left
    return processed.log_softmax(dim=-1)


def _race(found: Candidates, keys: NDArray[np.uint64]) -> Tensor:
    """The token of each row whose delay is the smallest in proportion to its probability: int64 [R]."""
    if found.columns is None:
        return (found.scaled - delays(keys, found.scaled.shape[1], found.scaled.device).log_()).argmax(dim=-1)
    winners = (found.scaled - delays_of(keys, found.columns).log_()).argmax(dim=-1, keepdim=True)
    return found.columns.gather(1, winners).squeeze(1)
