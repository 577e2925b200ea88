"""Attention of a flat batch over the paged cache in plain PyTorch, for any device and dtype."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.capped_attention import capped_attention
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.rotary import Rotation, rotate


class Scoring(NamedTuple):
    """How scores become shares of the values; as in AttentionPlan."""

    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    is_chunked: bool

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch has a fused kernel for it."""
        return self.soft_cap is None and self.sinks is None

    def visible(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Whether tokens at the positions ``queries`` attend to those at ``keys``; the shapes broadcast."""
        seen = keys <= queries
        if self.window is None:
            return seen
        first = queries // self.window * self.window if self.is_chunked else queries - self.window + 1
        return seen & (keys >= first)


class TorchAttention:
    """The rows of one batch, per request or in groups of requests.

    Decoding requests are grouped by the power of two of blocks that holds their context: one call processes a group,
    with at most half of it padding. The padding of a request depends only on its own length.
    """

    def __init__(self, batch: ForwardBatch, block_size_tokens: int) -> None:
        self._blocks, self._offsets = batch.slots // block_size_tokens, batch.slots % block_size_tokens
        self._prefills: list[PrefillRequest] = []
        widths: dict[int, list[int]] = {}
        starts, lengths = batch.query_starts.tolist(), batch.context_lengths.tolist()
        tables = batch.block_tables.long()
        for request, length in enumerate(lengths):
            rows = slice(starts[request], starts[request + 1])
            num_blocks = -(-length // block_size_tokens)
            if rows.stop - rows.start == 1:
                widths.setdefault(1 << (num_blocks - 1).bit_length(), []).append(request)
            elif rows.stop > rows.start:
                self._prefills.append(PrefillRequest(rows, length, tables[request, :num_blocks]))
        self._groups = [DecodeGroup(batch, tables, requests, width) for width, requests in widths.items()]

    def attend(
        self,
        heads: Tensor,
        rotation: Rotation | None,
        cache: LayerCache,
        window: int | None,
        soft_cap: float | None = None,
        value_width: int | None = None,
        sinks: Tensor | None = None,
        is_chunked: bool = False,
    ) -> Tensor:
        """As in AttentionPlan."""
        kv_heads, key_width = cache[0].shape[1], cache[0].shape[3]
        query_heads = heads.shape[1] - len(cache) * kv_heads
        queries, keys, *others = torch.split(heads, [query_heads, *[kv_heads] * len(cache)], dim=1)
        if rotation is not None:
            queries, keys = rotate(queries, *rotation), rotate(keys, *rotation)
        for stored, new in zip(cache, (keys, *others), strict=True):
            stored[self._blocks, :, self._offsets] = new
        # With one array the values are the ends of the keys; with two this is all of the other one.
        width = value_width or key_width
        values, pools = (keys, *others)[-1][..., -width:], (cache[0], cache[-1][..., -width:])
        seen = queries.new_empty(len(queries), query_heads, width)
        scoring = Scoring(window, soft_cap, sinks, is_chunked)
        for prefill in self._prefills:
            seen[prefill.rows] = prefill.attend(queries, keys, values, pools, scoring)
        for group in self._groups:
            seen[group.rows] = group.attend(queries, pools, scoring)
        return seen


class DecodeGroup:
    """Requests with one new token each, whose contexts are padded to ``width`` blocks."""

    def __init__(self, batch: ForwardBatch, tables: Tensor, requests: list[int], width: int) -> None:
        members = torch.tensor(requests, device=tables.device)
        self.rows = batch.query_starts.long()[members]
        blocks = tables[members, :width]
        self._blocks = pad(blocks, (0, width - blocks.shape[1])).flatten()
        self._lengths = batch.context_lengths.long()[members]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, queries: Tensor, cache: LayerCache, scoring: Scoring) -> Tensor:
        """Attention output of this group's rows of ``queries``: [group, heads, value width]; ``cache`` is keys and
        values.
        """
        mine = queries[self.rows]
        keys, values = (_gather(stored, self._blocks, len(mine)) for stored in cache)
        # Query heads that share a key head become its query rows, so that no key is repeated.
        grouped = mine.reshape(len(mine), keys.shape[1], -1, mine.shape[-1])
        if scoring.window not in self._masks:
            self._masks[scoring.window] = self._mask(keys.shape[2], scoring, queries.dtype)
        mask = self._masks[scoring.window]
        if scoring.is_plain:
            seen = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        else:
            sinks = None if scoring.sinks is None else scoring.sinks.view(keys.shape[1], 1, -1)
            seen = capped_attention(grouped, keys, values, mask, scoring.soft_cap, sinks)
        return seen.reshape(*mine.shape[:2], -1)

    def _mask(self, padded_length: int, scoring: Scoring, dtype: torch.dtype) -> Tensor:
        key_positions = torch.arange(padded_length, device=self._lengths.device)
        visible = scoring.visible(key_positions, self._lengths[:, None] - 1)
        return _additive(visible, dtype)[:, None, None, :]


class PrefillRequest:
    """One request with several new tokens, the last of a context of ``context_length``."""

    def __init__(self, rows: slice, context_length: int, blocks: Tensor) -> None:
        self.rows = rows
        self._context_length = context_length
        self._blocks = blocks
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cache: LayerCache,
        scoring: Scoring,
    ) -> Tensor:
        """Attention output of this request's rows of ``queries``: [rows, heads, value width]; ``cache`` is keys and
        values.
        """
        mine = queries[self.rows].transpose(0, 1)[None]
        num_queries, length, window = mine.shape[2], self._context_length, scoring.window
        whole = num_queries == length and (window is None or length <= window) and scoring.is_plain
        if whole:
            own_keys, own_values = (new[self.rows].transpose(0, 1)[None] for new in (keys, values))
        else:
            own_keys, own_values = (_gather(stored, self._blocks, 1)[:, :, :length] for stored in cache)
            if window not in self._masks:
                self._masks[window] = self._mask(num_queries, scoring, queries)
        if not scoring.is_plain:
            sinks = None if scoring.sinks is None else scoring.sinks.view(own_keys.shape[1], -1, 1)
            seen = capped_attention(mine, own_keys, own_values, self._masks[window], scoring.soft_cap, sinks)
            return seen[0].transpose(0, 1)
        mask = None if whole else self._masks[window]
        seen = scaled_dot_product_attention(
            mine, own_keys, own_values, attn_mask=mask, is_causal=whole, enable_gqa=True
        )
        return seen[0].transpose(0, 1)

    def _mask(self, num_queries: int, scoring: Scoring, like: Tensor) -> Tensor:
        key_positions = torch.arange(self._context_length, device=like.device)
        return _additive(scoring.visible(key_positions, key_positions[-num_queries:, None]), like.dtype)


def _gather(stored: Tensor, blocks: Tensor, requests: int) -> Tensor:
    """The keys or values in ``blocks`` (flattened tables of ``requests``): [requests, kv heads, tokens, head_dim]."""
    gathered = stored.index_select(0, blocks)
    gathered = gathered.view(requests, -1, *gathered.shape[1:]).transpose(1, 2)
    return gathered.flatten(2, 3)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``visible``, minus infinity elsewhere; computed once, because a boolean mask would be converted in every
    layer.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
