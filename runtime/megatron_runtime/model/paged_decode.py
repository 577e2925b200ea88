"""Attention of decoding requests over the blocks where they lie, on a CPU.

A block of the pool is a batch entry of one fused call, whoever owns it; what a request's blocks bring is put together
by the logarithms of their sums (Dao et al., Flash-Decoding). So no context is copied or padded, and what a request sees
depends on its own blocks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.model.forward_batch import ForwardBatch

LEAST_SHARE = 0.5
"""Of a stretch of the pool, the part that must be asked for; where less is, its blocks are gathered instead."""


@dataclass(frozen=True)
class BlockPlan:
    """Which blocks the queries meet: N of them, n wanted, at most W per request."""

    stretch: slice | None
    """The N blocks that are read in place, wanted or not; None: ``blocks`` are gathered."""
    blocks: Tensor
    """int64 [n], ordered by request and position."""
    owners: Tensor
    """int64 [N], the request whose query a block meets; 0 where nobody wants it."""
    mask: Tensor
    """[N, 1, 1, block_size_tokens], additive."""
    places: Tensor
    """int64 [R, W], where among the N each request's blocks are; padded with its own first."""
    padding: Tensor
    """bool [R, W, 1, 1]."""

    def read(self, stored: Tensor) -> Tensor:
        """The N blocks of keys or values: [N, kv heads, block_size_tokens, head_dim]."""
        return stored.index_select(0, self.blocks) if self.stretch is None else stored[self.stretch]


class PagedDecode:
    """The part of a batch that has one new token per request, in the given order."""

    def __init__(self, batch: ForwardBatch, requests: list[int], block_size_tokens: int) -> None:
        members = torch.tensor(requests)
        self.rows = batch.query_starts.long()[members]
        self._tables = batch.block_tables.long()[members]
        self._lengths = batch.context_lengths.long()[members]
        self._block_size = block_size_tokens
        self._plans: dict[int | None, BlockPlan] = {}

    def attend(self, queries: Tensor, cache: tuple[Tensor, Tensor], window: int | None) -> Tensor:
        """What this part's rows of ``queries`` see: [R, heads, head_dim]. A query looks back over ``window`` tokens."""
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = self._plan(window, queries.dtype)
        keys, values = (plan.read(stored) for stored in cache)
        mine = queries[self.rows]
        # The query heads that share a key head take the place of its query rows, so that no key is repeated.
        grouped = mine.view(len(mine), keys.shape[1], -1, mine.shape[-1])
        seen, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped[plan.owners], keys, values, attn_mask=plan.mask
        )
        shares = log_sums[plan.places].masked_fill_(plan.padding, float("-inf")).softmax(dim=1)
        merged: Tensor = (seen[plan.places] * shares[..., None]).sum(dim=1)
        return merged.to(queries.dtype).view(mine.shape)

    def _plan(self, window: int | None, dtype: torch.dtype) -> BlockPlan:
        size, lengths = self._block_size, self._lengths
        first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0) // size
        columns = torch.arange(self._tables.shape[1])
        wanted = (columns >= first[:, None]) & (columns * size < lengths[:, None])
        requests, ordinals = wanted.nonzero(as_tuple=True)
        blocks = self._tables[requests, ordinals]
        stretch = _stretch(blocks)
        start, count = (0, len(blocks)) if stretch is None else (stretch.start, stretch.stop - stretch.start)
        indices = torch.arange(count) if stretch is None else blocks - start
        positions = ordinals[:, None] * size + torch.arange(size)
        visible = positions < lengths[requests, None]
        if window is not None:
            visible &= positions >= lengths[requests, None] - window
        mask = torch.zeros(count, size, dtype=dtype)
        mask[indices] = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        counts = wanted.sum(dim=1)
        ends = counts.cumsum(0)
        steps = torch.arange(int(counts.max()))
        padding = steps >= counts[:, None]
        # Its own and not another's: what isn't finite must not spread, not even times zero.
        places = indices[(ends - counts)[:, None] + steps.where(~padding, 0)]
        owners = torch.zeros(count, dtype=torch.long)
        owners[indices] = requests
        return BlockPlan(stretch, blocks, owners, mask[:, None, None], places, padding[..., None, None])


def _stretch(blocks: Tensor) -> slice | None:
    """The part of the pool that holds ``blocks``, if reading it all costs no more than to gather them."""
    start, end = int(blocks.min()), int(blocks.max()) + 1
    if len(blocks) < LEAST_SHARE * (end - start) or int((blocks - start).bincount().max()) > 1:
        return None
    return slice(start, end)
