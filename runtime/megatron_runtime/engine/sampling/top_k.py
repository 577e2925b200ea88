"""The largest values of long rows, found by blocks instead of sorting."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64
_WORTHWHILE = 4
"""Blocks are used if the selected ones hold at most 1 / _WORTHWHILE of the row."""


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row, and the first column that has it. NaN is larger than any number.

    ``amax`` is several times faster than ``max`` with indices, so indices are computed for one block only.

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


def top_k(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row and their columns, in descending order. Exact, except for the selection among
    equal values.

    The ``count`` blocks with the largest maxima contain all of them: each of these maxima is at least as large as any
    value of the other blocks.

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
