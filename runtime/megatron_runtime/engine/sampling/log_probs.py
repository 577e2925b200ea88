"""Log probabilities of given tokens and of the most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.engine.sampling.top_k import top_k


@dataclass(frozen=True)
class LogProbs:
    """The log probabilities of P positions."""

    chosen: list[float]
    """[P], of the target token."""
    top_ids: list[list[int]]
    """[P][n], the most likely tokens in descending order, without excluded ones."""
    top_values: list[list[float]]
    """[P][n], their log probabilities."""


def log_probs(normalized: Tensor, targets: Tensor, top_n: int) -> LogProbs:
    """Log probabilities of one target per row, on the host.

    Args:
        normalized: float32 [P, vocab], log probabilities of every token.
        targets: int64 [P].
        top_n: Number of the most likely tokens to list; at most the vocabulary.
    """
    chosen = normalized.gather(1, targets[:, None]).squeeze(1).tolist()
    if top_n == 0:
        return LogProbs(chosen, [[] for _ in chosen], [[] for _ in chosen])
    values, ids = top_k(normalized, min(top_n, normalized.shape[1]))
    possible = (values > -torch.inf).sum(dim=1).tolist()
    return LogProbs(
        chosen,
        [row[:count] for row, count in zip(ids.tolist(), possible, strict=True)],
        [row[:count] for row, count in zip(values.tolist(), possible, strict=True)],
    )
