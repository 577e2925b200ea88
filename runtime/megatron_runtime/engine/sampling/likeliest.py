"""The largest numbers of long rows, without sorting the rows."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64
_WORTHWHILE = 4
"""How many times fewer numbers the chosen blocks have to hold than the row."""


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row, and the first column that has it; NaN is larger than anything.

    Maxima alone are found several times faster than maxima with their places.

    Args:
        logits: [S, vocab].

    Returns:
        Values [S] and columns, int64 [S].
    """
    blocks = logits.shape[1] // _BLOCK
    if blocks < _BLOCK:
        return logits.max(dim=-1)
    body = logits[:, : blocks * _BLOCK].view(len(logits), blocks, _BLOCK)
    first = body.amax(dim=2).argmax(dim=1)
    inside = torch.arange(_BLOCK, device=logits.device)
    rest = torch.arange(blocks * _BLOCK, logits.shape[1], device=logits.device).expand(len(logits), -1)
    columns = torch.cat((first[:, None] * _BLOCK + inside, rest), dim=1)
    values, places = logits.gather(1, columns).max(dim=1)
    return values, columns.gather(1, places[:, None]).squeeze(1)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row and where they are, largest first; exact but for the choice among equals.

    The ``count`` blocks with the largest maxima hold them all: each of these maxima is at least as large as anything
    in another block.

    Args:
        logits: [S, vocab].
        count: At most vocab.

    Returns:
        Values [S, count] and their columns, int64 [S, count].
    """
    vocabulary = logits.shape[1]
    blocks = vocabulary // _BLOCK
    if count * _WORTHWHILE > blocks:
        best = logits.topk(count, dim=-1)
        return best.values, best.indices
    body = logits[:, : blocks * _BLOCK].view(len(logits), blocks, _BLOCK)
    chosen = body.amax(dim=2).topk(count, dim=-1, sorted=False).indices
    inside = torch.arange(_BLOCK, device=logits.device)
    columns = (chosen[:, :, None] * _BLOCK + inside).flatten(1)
    rest = torch.arange(blocks * _BLOCK, vocabulary, device=logits.device).expand(len(logits), -1)
    columns = torch.cat((columns, rest), dim=1)
    best = logits.gather(1, columns).topk(count, dim=-1)
    return best.values, columns.gather(1, best.indices)
