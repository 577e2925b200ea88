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

    @classmethod
    def from_arrays(cls, chosen: Tensor, ids: Tensor, values: Tensor) -> LogProbs:
        """From the results of `log_probs` on the host."""
        possible = (values > -torch.inf).sum(dim=1).tolist()
        return cls(
            chosen.tolist(),
            [row[:count] for row, count in zip(ids.tolist(), possible, strict=True)],
            [row[:count] for row, count in zip(values.tolist(), possible, strict=True)],
        )


def log_probs(normalized: Tensor, targets: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of one target per row, and of the most likely tokens.

    Args:
        normalized: float32 [P, vocab], log probabilities of every token.
        targets: int64 [P].
        top_n: Number of the most likely tokens to list.

    Returns:
        Log probabilities of the targets, float32 [P]; the most likely tokens, int64 [P, n]; and their log
        probabilities, float32 [P, n], in descending order. n is ``top_n``, at most the vocabulary.
    """
    chosen = normalized.gather(1, targets[:, None]).squeeze(1)
    if top_n == 0:
        return chosen, targets.new_empty(len(targets), 0), chosen.new_empty(len(targets), 0)
    values, ids = top_k(normalized, min(top_n, normalized.shape[1]))
    return chosen, ids, values
