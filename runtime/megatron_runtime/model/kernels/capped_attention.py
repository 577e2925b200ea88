"""Attention with limited scores (Gemma 2) or with sinks (gpt-oss), which PyTorch has no fused kernel for."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, soft_cap: float | None, sinks: Tensor | None = None
) -> Tensor:
    """``softmax(cap * tanh(q k / sqrt(head_dim) / cap) + mask) v``: [batch, heads, rows, value width].

    ``sinks`` [kv heads, heads per kv head, rows or 1] are further scores of each query, without values.

    ``keys`` and ``values`` are [batch, kv heads, tokens, width], ``mask`` is additive and broadcasts to [batch, kv
    heads, rows, tokens]. Query heads that share a key head are adjacent.
    """
    batch, heads, rows, head_dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, rows, head_dim)
    scores = grouped @ keys.transpose(-1, -2)[:, :, None] / math.sqrt(head_dim)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = (scores + mask[..., None, :, :]).float()
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, ..., None].expand(*scores.shape[:-1], 1)), dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., : keys.shape[2]].to(values.dtype)
    return (shares @ values[:, :, None]).view(batch, heads, rows, -1)
