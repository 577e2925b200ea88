"""Attention with limited scores before the softmax (Gemma 2), which PyTorch has no fused kernel for."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def capped_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, soft_cap: float) -> Tensor:
    """``softmax(cap * tanh(q k / sqrt(head_dim) / cap) + mask) v``: [batch, heads, rows, value width].

    ``keys`` and ``values`` are [batch, kv heads, tokens, width], ``mask`` is additive and broadcasts to [batch, kv
    heads, rows, tokens]. Query heads that share a key head are adjacent.
    """
    batch, heads, rows, head_dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, rows, head_dim)
    scores = grouped @ keys.transpose(-1, -2)[:, :, None] / math.sqrt(head_dim)
    scores = torch.tanh(scores / soft_cap) * soft_cap + mask[..., None, :, :]
    shares = torch.softmax(scores.float(), dim=-1).to(values.dtype)
    return (shares @ values[:, :, None]).view(batch, heads, rows, -1)
