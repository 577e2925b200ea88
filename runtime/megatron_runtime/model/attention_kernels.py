"""Attention over the cache's blocks where they lie, compiled for the processor at hand.

What a query sees is computed in stretches of CHUNK positions, each with its own maximum (Milakov and Gimelshein, Online
normalizer calculation for softmax), in an order that its own position alone decides. So its bits depend neither on the
rest of the batch, nor on how its prompt was cut, nor on where its blocks are or how large they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, prange, types, uint16, void
from numba.extending import overload

from megatron_runtime.model.prefetch import prefetch
from megatron_runtime.model.threads import can_share_threads

CHUNK = 64
"""Positions between two looks at the maximum."""

# No promise that all is finite: a NaN in the weights has to come out as one.
_FAST = {"reassoc", "contract", "arcp", "nsz"}
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy", "boundscheck": False}

Kernel = Callable[..., None]


@cache
def store_kernel(narrow: bool) -> Kernel:
    """``store(new, stored, slots)``: put rows [T, kv heads, head_dim] into the blocks at slots int64 [T].

    ``narrow``: Both are the bits of bfloat16 as uint16; else float32.
    """
    scalar = uint16 if narrow else float32

    def store(new: Any, stored: Any, slots: Any) -> None:
        size = stored.shape[2]
        for row in range(len(slots)):
            block, offset = slots[row] // size, slots[row] % size
            for head in range(stored.shape[1]):
                for channel in range(stored.shape[3]):
                    stored[block, head, offset, channel] = new[row, head, channel]

    return _compile(store, void(types.Array(scalar, 3, "A"), scalar[:, :, :, ::1], int64[::1]))


@cache
def attention_kernel(head_dim: int, narrow: bool) -> Kernel:
    """``attend(queries, seen, keys, values, tables, tiles, bounds, window, soft_cap)``.

    Args of the kernel:
        queries, seen: float32 [T, heads, head_dim]; ``seen`` is written.
        keys, values: [num_blocks, kv heads, block_size_tokens, head_dim]; see ``narrow``.
        tables: int32 [R, W], blocks of each request.
        tiles: int32 [N, 4], neighbouring queries of a request: its row in ``tables``, the first query's row and
            position, and how many they are.
        bounds: int64 [threads + 1], where the threads' shares of the N * kv heads pairs of a tile and a kv head begin.
        window: Positions that a query looks back over, itself included.
        soft_cap: Scores are squeezed into plus or minus this; 0 for not at all.

    ``narrow``: Keys and values are the bits of bfloat16 as uint16; else float32.
    """

    def attend(
        queries: Any, seen: Any, keys: Any, values: Any, tables: Any, tiles: Any, bounds: Any, window: int,
        soft_cap: Any,
    ) -> None:  # fmt: skip
        for share in prange(len(bounds) - 1):
            _attend(
                queries, seen, keys, values, tables, tiles, bounds[share], bounds[share + 1], window, soft_cap,
                head_dim,
            )  # fmt: skip

    rows = float32[:, :, ::1]
    pool = (uint16 if narrow else float32)[:, :, :, ::1]
    table = int32[:, ::1]
    return _compile(
        attend, void(rows, rows, pool, pool, table, table, int64[::1], int64, float32), parallel=can_share_threads()
    )


@njit(inline="always")
def _attend(
    queries: Any, seen: Any, keys: Any, values: Any, tables: Any, tiles: Any, first: int, last: int, window: int,
    soft_cap: Any, head_dim: int,
) -> None:  # fmt: skip
    """Compute some of the pairs of a tile and a kv head."""
    zero, lowest = np.float32(0), np.float32(-np.inf)
    kv_heads = keys.shape[1]
    sharing = queries.shape[1] // kv_heads
    widest = tiles[:, 3].max() * sharing
    sums = np.empty((widest, head_dim), np.float32)
    totals, tops = np.empty(widest, np.float32), np.empty(widest, np.float32)
    scores = np.empty(CHUNK, np.float32)
    for item in range(first, last):
        kv_head = item % kv_heads
        request, first_row, first_position, rows = tiles[item // kv_heads]
        table = tables[request]
        sums[:], totals[:], tops[:] = zero, zero, lowest
        start, stop = max(0, first_position - window + 1) // CHUNK * CHUNK, first_position + rows
        for chunk in range(start, stop, CHUNK):
            # What comes next: the head's next stretch, or the next head's first one.
            ahead, ahead_head = chunk + CHUNK, kv_head
            if ahead >= stop:
                ahead, ahead_head = start, (kv_head + 1) % kv_heads
            for query in range(rows * sharing):
                row, head = first_row + query // sharing, kv_head * sharing + query % sharing
                position = first_position + query // sharing
                begin, end = max(chunk, position - window + 1), min(chunk + CHUNK, position + 1)
                if begin >= end:
                    continue
                _score(queries[row, head], keys, values, table, kv_head, begin, end, scores, head_dim)
                top = tops[query]
                for index in range(end - begin):
                    if soft_cap != zero:
                        scores[index] = _squeeze(scores[index], soft_cap)
                    top = max(top, scores[index])
                fade = _exp(tops[query] - top)
                total = totals[query] * fade
                for index in range(end - begin):
                    scores[index] = _exp(scores[index] - top)
                    total += scores[index]
                tops[query], totals[query] = top, total
                _mix(
                    sums[query], fade, values, keys, table, kv_head, begin, end, scores, head_dim, ahead, ahead_head,
                    stop - 1,
                )  # fmt: skip
        for query in range(rows * sharing):
            result = seen[first_row + query // sharing, kv_head * sharing + query % sharing]
            for channel in range(head_dim):
                result[channel] = sums[query, channel] / totals[query]


@njit(inline="always")
def _score(
    query: Any, keys: Any, values: Any, table: Any, kv_head: int, begin: int, end: int, scores: Any, head_dim: int
) -> None:  # fmt: skip
    """Fill in the products of a query with the keys from ``begin`` to ``end``, and fetch the values meanwhile."""
    scale = np.float32(head_dim**-0.5)
    size = keys.shape[2]
    key = begin
    while key < end:
        offset = key % size
        count = min(size - offset, end - key)
        block = keys[table[key // size], kv_head, offset : offset + count]
        ahead = values[table[key // size], kv_head, offset : offset + count]
        for place in range(count):
            prefetch(ahead[place])
            product = np.float32(0)
            for channel in range(head_dim):
                product += query[channel] * _widen(block[place, channel])
            scores[key - begin + place] = product * scale
        key += count


@njit(inline="always")
def _mix(
    mixed: Any, fade: Any, values: Any, keys: Any, table: Any, kv_head: int, begin: int, end: int, shares: Any,
    head_dim: int, ahead: int, ahead_head: int, furthest: int,
) -> None:  # fmt: skip
    """Fade what was mixed before, and add each value from ``begin`` to ``end`` by its share.

    Meanwhile fetch as many keys of a head, from position ``ahead`` on but not past ``furthest``.
    """
    size = values.shape[2]
    for channel in range(head_dim):
        mixed[channel] *= fade
    key = begin
    while key < end:
        offset = key % size
        count = min(size - offset, end - key)
        block = values[table[key // size], kv_head, offset : offset + count]
        following = keys[table[min(ahead + key - begin, furthest) // size], ahead_head, offset : offset + count]
        for place in range(count):
            prefetch(following[place])
            share = shares[key - begin + place]
            for channel in range(head_dim):
                mixed[channel] += share * _widen(block[place, channel])
        key += count


def _compile(function: Callable[..., None], signature: Any, *, parallel: bool = False) -> Kernel:
    try:
        compiled: Kernel = njit(signature, cache=True, parallel=parallel, **_OPTIONS)(function)
    except RuntimeError:
        # Numba's word for: no folder can be written to.
        compiled = njit(signature, parallel=parallel, **_OPTIONS)(function)
    return compiled


def _widen(value: Any) -> Any:
    """A float32 of itself, or of the bits of a bfloat16."""


@overload(_widen, strict=False)
def _widen_by_type(value: Any) -> Any:
    if isinstance(value, types.Integer):
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


@njit(inline="always")
def _squeeze(score: Any, cap: Any) -> Any:
    """``cap * tanh(score / cap)``."""
    two = np.float32(2)
    return cap * (np.float32(1) - two / (_exp(two * score / cap) + np.float32(1)))


@njit(inline="always")
def _exp(x: Any) -> Any:
    """The exponential by a power of two and a polynomial (Cody and Waite), within 2 units in the last place."""
    # A NaN is unequal to itself and has to stay.
    x = max(min(x, np.float32(88.0)), np.float32(-87.0)) if x == x else x
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1.0)
    return series * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
