"""Random batches over a paged cache, and their attention in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_runtime.gpu import attention


@dataclass(frozen=True)
class PagedCase:
    """A flat batch; every value of the cache that no request has is NaN."""

    lengths: tuple[tuple[int, int], ...]
    """Context and new tokens of each request."""
    heads: Tensor
    rotation: tuple[Tensor, Tensor] | None
    cache: tuple[Tensor, Tensor]
    tables: Tensor
    slots: Tensor
    query_starts: Tensor

    @classmethod
    def random(
        cls,
        lengths: tuple[tuple[int, int], ...],
        heads: tuple[int, int],
        width: int,
        page: int,
        dtype: torch.dtype,
        *,
        turned: int | None = None,
    ) -> PagedCase:
        """Blocks in random order; the same seed for all cases."""
        generator = torch.Generator().manual_seed(1)
        query_heads, kv_heads = heads
        needed = [-(-length // page) for length, _ in lengths]
        order = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
        cache = torch.full((2, sum(needed) + 2, kv_heads, page, width), math.nan, dtype=dtype)
        tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
        slots: list[int] = []
        for row, (length, new) in enumerate(lengths):
            mine = [order.pop() for _ in range(needed[row])]
            tables[row, : len(mine)] = torch.tensor(mine)
            every = [mine[at // page] * page + at % page for at in range(length)]
            slots += every[length - new :]
            for slot in every[: length - new]:
                cache[:, slot // page, :, slot % page] = torch.randn(2, kv_heads, width, generator=generator)
        total = len(slots)
        rotation = None
        if turned != 0:
            angles = torch.randn(total, 1, (turned or width) // 2, generator=generator).repeat(1, 1, 2)
            rotation = (angles.cos().to(dtype), angles.sin().to(dtype))
        return cls(
            lengths,
            torch.randn(total, query_heads + 2 * kv_heads, width, generator=generator).to(dtype),
            rotation,
            (cache[0], cache[1]),
            tables,
            torch.tensor(slots),
            torch.tensor([0, *torch.tensor([new for _, new in lengths]).cumsum(0).tolist()], dtype=torch.int32),
        )

    def on(self, device: torch.device) -> PagedCase:
        """A copy on this device."""
        rotation = None if self.rotation is None else (self.rotation[0].to(device), self.rotation[1].to(device))
        return self._like(
            heads=self.heads.to(device),
            rotation=rotation,
            cache=(self.cache[0].to(device), self.cache[1].to(device)),
            tables=self.tables.to(device),
            slots=self.slots.to(device),
            query_starts=self.query_starts.to(device),
        )

    def attend(
        self, window: int | None, soft_cap: float | None, sinks: Tensor | None = None, is_chunked: bool = False
    ) -> Tensor:
        """By the kernels."""
        lengths = torch.tensor([length for length, _ in self.lengths], dtype=torch.int32).to(self.heads.device)
        batch = attention.PagedBatch(self.slots, self.query_starts, lengths, self.tables)
        return attention.attend(self.heads, self.rotation, self.cache, batch, window, soft_cap, sinks, is_chunked)

    def expected(
        self,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None = None,
        is_chunked: bool = False,
        *,
        rounded: torch.dtype | None = None,
    ) -> Tensor:
        """In float64, from the cache, which has the new keys and values; ``rounded``: the type of rotated queries, if
        it is not that of the heads."""
        keys, values = (array.double() for array in self.cache)
        kv_heads, page, width = keys.shape[1:]
        queries = self._rotated()[:, : self.heads.shape[1] - 2 * kv_heads].to(rounded or self.heads.dtype).double()
        seen = torch.empty_like(queries)
        for row, (length, new) in enumerate(self.lengths):
            every = torch.arange(length)
            at = self.tables[row][every // page].long(), every % page
            mine = queries[self.query_starts[row] : self.query_starts[row + 1]]
            own_keys, own_values = (
                part[at[0], :, at[1]].repeat_interleave(mine.shape[1] // kv_heads, 1) for part in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", mine, own_keys) / math.sqrt(width)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            position = every[length - new :, None]
            reach = window or length + 1
            first = position // reach * reach if is_chunked else position - reach + 1
            scores = scores.masked_fill((every > position) | (every < first), -math.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, new, 1)), dim=-1)
            weights = scores.softmax(-1)[..., :length]
            seen[self.query_starts[row] : self.query_starts[row + 1]] = torch.einsum(
                "hqk,khd->qhd", weights, own_values
            )
        return seen

    def check_cache(self, before: list[Tensor]) -> None:
        """The new tokens are in their slots, and all other values are those of ``before``."""
        kv_heads, page = self.cache[0].shape[1:3]
        new_keys = self._rotated()[:, -2 * kv_heads : -kv_heads]
        new_values = self.heads[:, -kv_heads:]
        for array, old, new in zip(self.cache, before, (new_keys, new_values), strict=True):
            old[self.slots // page, :, self.slots % page] = new.to(array.dtype)
            assert torch.allclose(array, old, rtol=1e-3, atol=1e-3, equal_nan=True)

    def with_first_of(self, other: PagedCase) -> PagedCase:
        """With the first request of another case, whose request has the same length, in place of its own first one."""
        heads = self.heads.clone()
        heads[:1] = other.heads[:1]
        assert self.rotation is not None
        assert other.rotation is not None
        rotation = tuple(torch.cat((b[:1], a[1:])) for a, b in zip(self.rotation, other.rotation, strict=True))
        cache = tuple(array.clone() for array in self.cache)
        count = -(-self.lengths[0][0] // cache[0].shape[2])
        for array, theirs in zip(cache, other.cache, strict=True):
            array[self.tables[0, :count].long()] = theirs[other.tables[0, :count].long()]
        return self._like(heads=heads, rotation=rotation, cache=cache)

    def piece(self, start: int, size: int) -> PagedCase:
        """A chunk of the only request, over the same cache."""
        rows = slice(start, start + size)
        assert self.rotation is not None
        return self._like(
            lengths=((start + size, size),),
            heads=self.heads[rows].clone(),
            rotation=tuple(part[rows] for part in self.rotation),
            slots=self.slots[rows],
            query_starts=torch.tensor([0, size], dtype=torch.int32),
        )

    def padded(self, rows: int) -> PagedCase:
        """With rows of padding: requests with one token, a context of 1 and the block of zeros."""
        cache = self.cache
        for array in cache:
            array[0] = 0
        heads, count = self.heads, len(self.lengths)
        assert self.rotation is not None
        return self._like(
            lengths=(*self.lengths, *((1, 1),) * rows),
            heads=torch.cat((heads, heads[:rows] + 1)),
            rotation=tuple(torch.cat((part, part[:rows])) for part in self.rotation),
            tables=torch.cat((self.tables, torch.zeros(rows, self.tables.shape[1], dtype=torch.int32))),
            slots=torch.cat((self.slots, torch.full((rows,), -1))),
            query_starts=torch.arange(count + rows + 1, dtype=torch.int32),
        )

    def _like(self, **changes: Any) -> PagedCase:
        return replace(self, **changes)

    def _rotated(self) -> Tensor:
        """All heads, as if they were queries or keys."""
        heads = self.heads.double()
        if self.rotation is None:
            return heads
        cosines, sines = (part.double() for part in self.rotation)
        turned = heads[..., : cosines.shape[-1]]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cosines + torch.cat((-second, first), dim=-1) * sines
        return torch.cat((turned, heads[..., cosines.shape[-1] :]), dim=-1)
