"""Log probabilities of given tokens, and the likeliest ones beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogProbs:
    """Of P positions; independent of temperature and filters."""

    chosen: list[float]
    """[P], of the token that stands there."""
    top_ids: list[list[int]]
    """[P][n], the likeliest tokens, likeliest first."""
    top_values: list[list[float]]
    """[P][n], their log probabilities."""


def log_probs(logits: Tensor, targets: Tensor, top_n: int) -> LogProbs:
    """Log probabilities of one target per row.

    Args:
        logits: float32 [P, vocab].
        targets: int64 [P].
        top_n: How many of the likeliest tokens to list; at most the vocabulary.
    """
    normalized = torch.log_softmax(logits, dim=-1)
    chosen = normalized.gather(1, targets[:, None]).squeeze(1).tolist()
    if top_n == 0:
        return LogProbs(chosen, [[] for _ in chosen], [[] for _ in chosen])
    top = normalized.topk(min(top_n, logits.shape[1]), dim=-1)
    return LogProbs(chosen, top.indices.tolist(), top.values.tolist())
