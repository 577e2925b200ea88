"""Gumbel-max sampling: the token with the largest sum of logit and Gumbel noise (Maddison, Tarlow and Minka 2014).

Gumbel noise is minus the logarithm of exponential noise. The largest logit of a block and its minimum exponential noise
bound the scores of all its tokens. The search scores the blocks with the highest bounds until no other bound exceeds
the best score. That usually takes a hundredth of the vocabulary, and the result is that of scoring all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.exponential_noise import BLOCK, block_minima, exponential_noise

_FIRST_BLOCKS = 32
"""Blocks of a row that the first round scores."""
_GROWTH = 8
"""Factor by which the number of blocks grows in each further round."""


def gumbel_max_among(scaled: Tensor, columns: Tensor, keys: NDArray[np.uint64]) -> Tensor:
    """The sampled tokens, from the given ones: int64 [R].

    Args:
        scaled: float32 [R, W], logits over temperature, -inf for excluded tokens.
        columns: int64 [R, W], the tokens.
        keys: [R], from noise_keys.
    """
    best = _scores(scaled, columns, keys).argmax(dim=-1, keepdim=True)
    return columns.gather(1, best).squeeze(1)


def gumbel_max(
    logits: Tensor,
    keys: NDArray[np.uint64],
    *,
    rows: Tensor | None = None,
    top: Tensor | None = None,
    temperature: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    """The sampled tokens, from the whole vocabulary: int64 [R].

    Args:
        logits: float32 [S, vocab], -inf for excluded tokens.
        keys: [R], from noise_keys.
        rows: int64 [R], rows of the logits; None means all.
        top: [R], subtracted from the logits; None means 0.
        temperature: [R], divides the difference; None means 1.
        least: [R], excludes tokens whose scaled logit is lower; None excludes none.
    """
    count = len(keys)
    search = _Search(
        logits,
        keys,
        torch.arange(count, device=logits.device) if rows is None else rows,
        logits.new_zeros(count) if top is None else top,
        logits.new_ones(count) if temperature is None else temperature,
        logits.new_full((count,), -torch.inf) if least is None else least,
    )
    bounds = search.block_bounds()
    num_blocks = bounds.shape[1]
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    pending = torch.arange(count, device=logits.device)
    width = _FIRST_BLOCKS
    while len(pending):
        width = min(width, num_blocks)
        best = bounds[pending].topk(min(width + 1, num_blocks), dim=-1)
        scores, tokens[pending] = search.best_token(pending, best.indices[:, :width])
        if width == num_blocks:
            break
        pending = pending[scores < best.values[:, width]]
        width *= _GROWTH
    return tokens


@dataclass(frozen=True)
class _Search:
    """The search for the sampled tokens of R rows. The fields are the arguments of gumbel_max."""

    logits: Tensor
    keys: NDArray[np.uint64]
    rows: Tensor
    top: Tensor
    temperature: Tensor
    least: Tensor

    def block_bounds(self) -> Tensor:
        """[R, blocks], an upper bound of the scores in each block."""
        maxima = _block_maxima(self.logits)[self.rows]
        bounds = (maxima - self.top[:, None]) / self.temperature[:, None]
        bounds = torch.where(bounds < self.least[:, None], -torch.inf, bounds)
        bounds -= block_minima(self.keys, maxima.shape[1], self.logits.device).log_()
        return bounds

    def best_token(self, which: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The highest score in some blocks, [N, B], of N of the R rows, and its token, int64 [N]."""
        vocabulary = self.logits.shape[1]
        inside = torch.arange(BLOCK, device=blocks.device)
        columns = (blocks[:, :, None] * BLOCK + inside).flatten(1)
        values = self.logits[self.rows[which, None], columns.clamp(max=vocabulary - 1)]
        scaled = (values - self.top[which, None]) / self.temperature[which, None]
        scaled.masked_fill_((columns >= vocabulary) | (scaled < self.least[which, None]), -torch.inf)
        scores, places = _scores(scaled, columns, self.keys[which.cpu().numpy()]).max(dim=-1)
        return scores, columns.gather(1, places[:, None]).squeeze(1)


def _block_maxima(logits: Tensor) -> Tensor:
    """[S, blocks], the largest logit of every block."""
    vocabulary = logits.shape[1]
    whole = vocabulary // BLOCK
    maxima = logits[:, : whole * BLOCK].view(len(logits), whole, BLOCK).amax(dim=2)
    if whole * BLOCK == vocabulary:
        return maxima
    return torch.cat((maxima, logits[:, whole * BLOCK :].amax(dim=1)[:, None]), dim=1)


def _scores(scaled: Tensor, columns: Tensor, keys: NDArray[np.uint64]) -> Tensor:
    return scaled - exponential_noise(keys, columns).log_()
