"""The race of tokens: the smallest delay in proportion to the probability wins.

The first delay of a block of tokens and its likeliest token bound how well any of them can do. The winner is sought in
the blocks that promise most, until no other block's bound is better than what was found; nearly always that is a
hundredth of the vocabulary, and the outcome is that of a race of all.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.noise import BLOCK, delays_of, first_delays

_PROMISING = 32
_MORE = 8
"""How many times more blocks are looked at where those were not enough."""


def race_among(scaled: Tensor, columns: Tensor, keys: NDArray[np.uint64]) -> Tensor:
    """The winners among some tokens: int64 [R].

    Args:
        scaled: float32 [R, W], logits over temperature, -inf for what may not win.
        columns: int64 [R, W], the tokens.
        keys: [R], as from noise_keys.
    """
    winners = _scores(scaled, columns, keys).argmax(dim=-1, keepdim=True)
    return columns.gather(1, winners).squeeze(1)


def race(
    logits: Tensor,
    keys: NDArray[np.uint64],
    *,
    rows: Tensor | None = None,
    top: Tensor | None = None,
    temperature: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    """The winners among the whole vocabulary: int64 [R].

    Args:
        logits: float32 [S, vocab], -inf for what may not win.
        keys: [R], as from noise_keys.
        rows: int64 [R], those of the logits that race; None means all of them.
        top: [R], subtracted from the logits; None means 0.
        temperature: [R], divides them then; None means 1.
        least: [R], what falls short of this then may not win; None means that all may.
    """
    count, vocabulary = len(keys), logits.shape[1]
    index = torch.arange(count, device=logits.device) if rows is None else rows
    top = logits.new_zeros(count) if top is None else top
    temperature = logits.new_ones(count) if temperature is None else temperature
    least = logits.new_full((count,), -torch.inf) if least is None else least
    blocks = -(-vocabulary // BLOCK)
    promise = (_maxima(logits, blocks)[index] - top[:, None]) / temperature[:, None]
    promise = torch.where(promise < least[:, None], -torch.inf, promise)
    promise -= first_delays(keys, blocks, logits.device).log_()
    winners = torch.empty(count, dtype=torch.int64, device=logits.device)
    running = torch.arange(count, device=logits.device)
    width = _PROMISING
    while len(running):
        width = min(width, blocks)
        best = promise[running].topk(min(width + 1, blocks), dim=-1)
        inside = torch.arange(BLOCK, device=logits.device)
        columns = (best.indices[:, :width, None] * BLOCK + inside).flatten(1)
        values = logits[index[running, None], columns.clamp(max=vocabulary - 1)]
        scaled = (values - top[running, None]) / temperature[running, None]
        scaled.masked_fill_((columns >= vocabulary) | (scaled < least[running, None]), -torch.inf)
        score, places = _scores(scaled, columns, keys[running.cpu().numpy()]).max(dim=-1)
        winners[running] = columns.gather(1, places[:, None]).squeeze(1)
        if width == blocks:
            break
        running = running[score < best.values[:, width]]
        width *= _MORE
    return winners


def _maxima(logits: Tensor, blocks: int) -> Tensor:
    """[S, blocks], the largest logit of every block."""
    whole = logits.shape[1] // BLOCK
    maxima = logits[:, : whole * BLOCK].view(len(logits), whole, BLOCK).amax(dim=2)
    return maxima if whole == blocks else torch.cat((maxima, logits[:, whole * BLOCK :].amax(dim=1)[:, None]), dim=1)


def _scores(scaled: Tensor, columns: Tensor, keys: NDArray[np.uint64]) -> Tensor:
    return scaled - delays_of(keys, columns).log_()
