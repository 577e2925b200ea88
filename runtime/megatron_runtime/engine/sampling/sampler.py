"""Choosing tokens from logits, for a whole batch at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_runtime.engine.sampling.candidates import candidates
from megatron_runtime.engine.sampling.likeliest import highest
from megatron_runtime.engine.sampling.race import race, race_among
from megatron_runtime.engine.sampling.sampling_table import SamplingRules

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
    narrow = rules.needs_candidates[noisy]
    free = noisy[~narrow]
    if free.size:
        rows = torch.from_numpy(free).to(logits.device)
        heat, least = (torch.from_numpy(values[free]).to(logits) for values in (rules.temperature, rules.min_p))
        winners = race(logits, rules.keys[free], rows=rows, top=top[rows], temperature=heat, least=least.log())
        tokens[rows] = winners
    for found in candidates(logits, top, rules, noisy[narrow]):
        keys = rules.keys[found.rows]
        winners = race(found.scaled, keys) if found.columns is None else race_among(found.scaled, found.columns, keys)
        tokens[torch.from_numpy(found.rows).to(logits.device)] = winners
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
