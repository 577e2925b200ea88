"""Attention that reads the blocks of the cache in place, compiled for the processor.

The output of a query is computed in chunks of CHUNK positions, each with its own maximum (Milakov and Gimelshein,
Online normalizer calculation for softmax), in an order that depends only on the query's position. So its bits depend
neither on the rest of the batch, nor on the chunks of its prompt, nor on the place and size of its blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, prange, void

from megatron_runtime.model.kernels.attention_instructions import TOGETHER, largest, mix_values, score_keys
from megatron_runtime.model.kernels.compiled import (
    array_at,
    compile_kernel,
    element,
    exponential,
    narrowed,
    rounded,
    scalar,
    widen,
)
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.recording import Kernel

CHUNK = 64
"""Positions per update of the maximum."""
NEVER = np.float32(-3e38)
"""A score whose exponential does not change a sum."""


@kernel_factory
def attention_kernel(key_width: int, value_width: int, values_in_keys: bool, narrow: bool) -> Kernel:
    """The compiled ``attend``, for keys and values of these widths.

    With ``values_in_keys`` a value is the last ``value_width`` channels of its rotated key; then ``value_pool`` is
    ``key_pool``, and ``given`` has no values. Otherwise both widths are the same.

    Args of the kernel:
        given: Address of [T, query heads + 2 * kv heads, key_width], each token's queries, keys and values, before the
            rotation.
        output, query_heads: Address of [T, query heads, value_width], and the number of query heads.
        key_pool, value_pool: Addresses of [num_blocks, kv heads, size, key_width]; the new keys and values are written
            at ``slots``.
        num_blocks, kv_heads, size: These numbers. A block has ``size`` tokens.
        slots: int64 [T].
        tables: int32 [R, W], blocks of each request.
        tiles: int32 [N, 4], consecutive queries of a request: its row in ``tables``, the row and position of the first
            query, and their number.
        rows: int64 [threads + 1], start of each thread's share of the T rows.
        pairs: int64 [threads + 1], start of each thread's share of the N * groups pairs of a tile and a group of query
            heads.
        groups: Number of groups of query heads; those of a group share a kv head. cosines, sines: [T, rotated
            channels], the rotation of queries and keys; may have no channels.
        window: Number of latest positions, including its own, that a query attends to.
        chunked: Not 0: size of the chunks of positions, of which a query attends to its own; then ``window`` is this
            size too.
        sinks: float32 [heads], scores that take part in the softmax of each query; or of no elements.
        soft_cap: Limit of the scores; 0 for none.

    ``narrow``: Floating-point arrays contain the bits of bfloat16 as uint16; else float32.
    """
    kind, arrays = element(narrow), 1 if values_in_keys else 2

    def attend(
        given: int, output: int, query_heads: int, key_pool: int, value_pool: int, num_blocks: int, kv_heads: int,
        size: int, slots: Any, tables: Any, tiles: Any, rows: Any, pairs: Any, groups: int, cosines: Any, sines: Any,
        window: int, chunked: int, sinks: Any, soft_cap: Any,
    ) -> None:  # fmt: skip
        heads = array_at(given, (len(slots), query_heads + arrays * kv_heads, key_width), kind)
        seen = array_at(output, (len(slots), query_heads, value_width), kind)
        keys = array_at(key_pool, (num_blocks, kv_heads, size, key_width), kind)
        values = array_at(value_pool, (num_blocks, kv_heads, size, key_width), kind)
        for share in prange(len(rows) - 1):
            _store(heads, keys, values, slots, rows[share], rows[share + 1], cosines, sines, key_width, values_in_keys)
        for share in prange(len(pairs) - 1):
            _attend(
                heads, seen, keys, values, tables, tiles, pairs[share], pairs[share + 1], groups, cosines, sines,
                window, chunked, sinks, soft_cap, key_width, value_width,
            )  # fmt: skip

    return compile_kernel(attend, _signature(narrow))


def _signature(narrow: bool) -> Any:
    turns, table, bounds = scalar(narrow)[:, ::1], int32[:, ::1], int64[::1]
    tables = bounds, table, table, bounds, bounds, int64
    return void(*[int64] * 8, *tables, turns, turns, int64, int64, float32[::1], float32)


@njit(inline="always")
def _store(
    heads: Any, keys: Any, values: Any, slots: Any, first: int, last: int, cosines: Any, sines: Any, key_width: int,
    values_in_keys: bool,
) -> None:  # fmt: skip
    """Write the rotated keys and the values of some rows into their blocks."""
    kv_heads, size = keys.shape[1], keys.shape[2]
    first_key = heads.shape[1] - (kv_heads if values_in_keys else 2 * kv_heads)
    for row in range(first, last):
        block, offset = slots[row] // size, slots[row] % size
        for kv_head in range(kv_heads):
            _turn(heads[row, first_key + kv_head], cosines[row], sines[row], keys[block, kv_head, offset])
            if not values_in_keys:
                value, new_value = values[block, kv_head, offset], heads[row, first_key + kv_heads + kv_head]
                for channel in range(key_width):
                    value[channel] = new_value[channel]


@njit(inline="always")
def _turn(head: Any, cosines: Any, sines: Any, turned: Any) -> None:
    """Rotate a head's first n channels, i with i + n / 2, and copy the others.

    Rounded after each operation to the type of ``head``, as in transformers: with the few digits of bfloat16, other
    rounding would change the model's answers.
    """
    half = len(cosines) // 2
    for channel in range(half):
        one, other = widen(head[channel]), widen(head[half + channel])
        ahead = rounded(one * widen(cosines[channel]), head) - rounded(other * widen(sines[channel]), head)
        behind = rounded(other * widen(cosines[half + channel]), head) + rounded(
            one * widen(sines[half + channel]), head
        )
        turned[channel], turned[half + channel] = narrowed(ahead, head), narrowed(behind, head)
    for channel in range(2 * half, len(turned)):
        turned[channel] = head[channel]


@njit(inline="always")
def _attend(
    heads: Any, seen: Any, keys: Any, values: Any, tables: Any, tiles: Any, first: int, last: int, groups: int,
    cosines: Any, sines: Any, window: int, chunked: int, sinks: Any, soft_cap: Any, key_width: int, value_width: int,
) -> None:  # fmt: skip
    """Compute some of the pairs of a tile and a group of query heads."""
    kv_heads, sharing = keys.shape[1], seen.shape[1] // groups
    widest = tiles[:, 3].max() * sharing
    queries, sums = np.empty((widest, key_width), heads.dtype), np.empty((widest, value_width), np.float32)
    totals, tops = np.empty(widest, np.float32), np.empty(widest, np.float32)
    scores = np.empty((TOGETHER, CHUNK), np.float32)
    for item in range(first, last):
        group = item % groups
        kv_head = group * kv_heads // groups
        request, first_row, first_position, rows = tiles[item // groups]
        table = tables[request]
        _begin(sums, totals, tops, sinks, group * sharing, sharing)
        for query in range(rows * sharing):
            row, head = first_row + query // sharing, group * sharing + query % sharing
            _turn(heads[row, head], cosines[row], sines[row], queries[query])
        start, stop = _first_key(first_position, window, chunked) // CHUNK * CHUNK, first_position + rows
        for chunk in range(start, stop, CHUNK):
            # The next chunk of the group, or the first one of the next group.
            ahead, ahead_head = chunk + CHUNK, kv_head
            if ahead >= stop:
                ahead, ahead_head = start, (group + 1) % groups * kv_heads // groups
            query = 0
            while query < rows * sharing:
                begin, end = _visible(first_position + query // sharing, chunk, window, chunked)
                together = 1
                while together < min(TOGETHER, rows * sharing - query):
                    following = first_position + (query + together) // sharing
                    if _visible(following, chunk, window, chunked) != (begin, end):
                        break
                    together += 1
                if begin < end:
                    _score(queries[query:], together, keys, values, table, kv_head, begin, end, scores, key_width)
                    for place in range(together):
                        _soften(scores[place], end - begin, soft_cap, tops, totals, sums, query + place)
                    _mix(
                        sums[query:], together, values, keys, table, kv_head, begin, end, scores, key_width,
                        value_width, ahead, ahead_head, stop - 1,
                    )  # fmt: skip
                query += together
        for query in range(rows * sharing):
            result = seen[first_row + query // sharing, group * sharing + query % sharing]
            _divide(sums[query], totals[query], result, value_width)


@njit(inline="always")
def _begin(sums: Any, totals: Any, tops: Any, sinks: Any, first_head: int, sharing: int) -> None:
    """Start the sums of queries; a sink is like a first key with its score and a value of zero."""
    sums[:], totals[:], tops[:] = np.float32(0), np.float32(0), np.float32(-np.inf)
    if len(sinks) > 0:
        totals[:] = np.float32(1)
        for query in range(len(tops)):
            tops[query] = sinks[first_head + query % sharing]


@njit(inline="always")
def _first_key(position: int, window: int, chunked: int) -> int:
    """The first position that a query at ``position`` attends to."""
    if chunked > 0:
        return position // chunked * chunked
    return max(0, position - window + 1)


@njit(inline="always")
def _divide(sums: Any, total: Any, result: Any, value_width: int) -> None:
    """Write a query's weighted mean of the values, in the type of ``result``."""
    for channel in range(value_width):
        result[channel] = narrowed(sums[channel] / total, result)


@njit(inline="always")
def _visible(position: int, chunk: int, window: int, chunked: int) -> tuple[int, int]:
    """The first position of a chunk that a query at ``position`` attends to, and the one after the last."""
    return max(chunk, _first_key(position, window, chunked)), min(chunk + CHUNK, position + 1)


@njit(inline="always")
def _score(
    queries: Any, together: int, keys: Any, values: Any, table: Any, kv_head: int, begin: int, end: int, scores: Any,
    key_width: int,
) -> None:  # fmt: skip
    """Compute the products of queries with the keys from ``begin`` to ``end``, and prefetch the values."""
    scale = np.float32(key_width**-0.5)
    size = keys.shape[2]
    key = begin
    while key < end:
        block, offset = table[key // size], key % size
        count = min(size - offset, end - key)
        first, to = keys[block, kv_head, offset].ctypes.data, scores.ctypes.data + (key - begin) * 4
        ahead = values[block, kv_head, offset].ctypes.data
        score_keys(keys, together, key_width, queries.ctypes.data, first, count, to, CHUNK, scale, ahead)
        key += count


@njit(inline="always")
def _soften(scores: Any, count: int, soft_cap: Any, tops: Any, totals: Any, sums: Any, query: int) -> None:
    """Replace ``count`` scores of a query by their exponentials, and scale its previous sum to the new maximum."""
    if soft_cap != np.float32(0):
        for index in range(count):
            scores[index] = _squeeze(scores[index], soft_cap)
    scores[count:] = NEVER
    top = max(tops[query], largest(scores.ctypes.data, CHUNK))
    fade, total = exponential(tops[query] - top), np.float32(0)
    for index in range(CHUNK):
        scores[index] = exponential(scores[index] - top)
        total += scores[index]
    tops[query], totals[query] = top, totals[query] * fade + total
    for channel in range(sums.shape[1]):
        sums[query, channel] *= fade


@njit(inline="always")
def _mix(
    sums: Any, together: int, values: Any, keys: Any, table: Any, kv_head: int, begin: int, end: int, shares: Any,
    key_width: int, value_width: int, ahead: int, ahead_head: int, furthest: int,
) -> None:  # fmt: skip
    """Add the weighted values from ``begin`` to ``end`` to the sums of queries.

    Also prefetches keys of the head from position ``ahead`` on, as many, up to ``furthest``.
    """
    size, before = values.shape[2], key_width - value_width
    row_bytes = values.shape[3] * values.itemsize
    key = begin
    while key < end:
        block, offset = table[key // size], key % size
        count = min(size - offset, end - key)
        first = values[block, kv_head, offset, before:].ctypes.data
        following = keys[table[min(ahead + key - begin, furthest) // size], ahead_head, offset].ctypes.data
        given = shares.ctypes.data + (key - begin) * 4
        mix_values(values, together, value_width, row_bytes, sums.ctypes.data, first, count, given, CHUNK, following)
        key += count


@njit(inline="always")
def _squeeze(score: Any, cap: Any) -> Any:
    """``cap * tanh(score / cap)``."""
    two = np.float32(2)
    return cap * (np.float32(1) - two / (exponential(two * score / cap) + np.float32(1)))
