"""Attention that reads the blocks of the cache in place, compiled for the processor.

The output of a query is computed in chunks of CHUNK positions, each with its own maximum (Milakov and Gimelshein,
Online normalizer calculation for softmax), in an order that depends only on the query's position. So its bits depend
neither on the rest of the batch, nor on the chunks of its prompt, nor on the place and size of its blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32, int64, njit, prange, void

from megatron_runtime.model.kernels.attention_chunks import (
    CHUNK,
    mix_chunk,
    score_chunk,
    score_chunk_by_panel,
    soften_chunk,
    transpose_chunk,
)
from megatron_runtime.model.kernels.attention_instructions import TOGETHER
from megatron_runtime.model.kernels.compiled import (
    array_at,
    compile_kernel,
    element,
    narrowed,
    rounded,
    scalar,
    widen,
)
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.key_panels import can_transpose, prepare_queries
from megatron_runtime.model.kernels.recording import Kernel

MANY = 12
"""Number of queries from which on it is faster to transpose the keys for them, measured with 64 and 128 channels."""


@kernel_factory
def attention_kernel(key_width: int, value_width: int, values_in_keys: bool, narrow: bool) -> Kernel:
    """The compiled ``attend``, for keys and values of these widths.

    With ``values_in_keys`` a value is the last ``value_width`` channels of its rotated key; then ``value_pool`` is
    ``key_pool``, and ``given`` has no values. Otherwise both widths are the same.

    Args of the kernel:
        given: Address of [T, query heads + 2 * kv heads, key_width], each token's queries, keys and values, before the
            rotation.
        output, query_heads: Address of [T, query heads, value_width], and the number of query heads.
        key_pool, value_pool, num_blocks, kv_heads, size: Addresses of [num_blocks, kv heads, size, key_width], and
            these numbers; the new keys and values are written at ``slots``. A block has ``size`` tokens.
        slots: int64 [T].
        tables: int32 [R, W], blocks of each request.
        tiles: int32 [N, 4], consecutive queries of a request: its row in ``tables``, the row and position of the first
            query, and their number.
        rows: int64 [threads + 1], start of each thread's share of the T rows.
        pairs: int64 [threads + 1], the same of the N * groups pairs of a tile and a group of query heads.
        groups: Number of groups of query heads; those of a group share a kv head.
        cosines, sines: [T, rotated channels], the rotation of queries and keys; may have no channels.
        window: Number of latest positions, including its own, that a query attends to.
        chunked: Not 0: size of the chunks of positions, of which a query attends to its own; then ``window`` is this
            size too.
        sinks: float32 [heads], scores that take part in the softmax of each query; or of no elements.
        soft_cap: Limit of the scores; 0 for none.

    ``narrow``: Floating-point arrays contain the bits of bfloat16 as uint16; else float32.
    """
    kind, arrays = element(narrow), 1 if values_in_keys else 2
    panel_width = key_width if can_transpose(key_width) else 0

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
                window, chunked, sinks, soft_cap, key_width, value_width, panel_width,
            )  # fmt: skip

    return compile_kernel(attend, _signature(narrow), fast=False)


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
    panel_width: int,
) -> None:  # fmt: skip
    """Compute some of the pairs of a tile and a group of query heads."""
    kv_heads, sharing = keys.shape[1], seen.shape[1] // groups
    widest = _most_rows(tiles) * sharing
    queries, sums = np.empty((widest, key_width), heads.dtype), np.empty((widest, value_width), np.float32)
    totals, tops = np.empty(widest, np.float32), np.empty(widest, np.float32)
    words, bounds = np.empty((widest + TOGETHER - 1, panel_width), np.float32), np.empty((widest, 2), np.int64)
    panel, scores = np.empty((panel_width, CHUNK), np.float32), np.empty((TOGETHER, CHUNK), np.float32)
    places = np.empty(CHUNK, np.int64)
    for item in range(first, last):
        group = item % groups
        kv_head = group * kv_heads // groups
        request, first_row, first_position, rows = tiles[item // groups]
        table, count = tables[request], rows * sharing
        _begin(sums, totals, tops, sinks, group * sharing, sharing)
        _turn_queries(heads, first_row, rows, group * sharing, sharing, cosines, sines, queries)
        has_panel = panel_width > 0 and count >= MANY
        if has_panel:
            prepare_queries(keys, key_width, count, queries.ctypes.data, words.ctypes.data)
        start, stop = _first_key(first_position, window, chunked) // CHUNK * CHUNK, first_position + rows
        for chunk in range(start, stop, CHUNK):
            # The next chunk of the group, or the first one of the next group.
            ahead, ahead_head = chunk + CHUNK, kv_head
            if ahead >= stop:
                ahead, ahead_head = start, (group + 1) % groups * kv_heads // groups
            low, high = _set_bounds(bounds, first_position, rows, sharing, chunk, window, chunked)
            if has_panel:
                begin, end = bounds[low, 0], bounds[high - 1, 1]
                transpose_chunk(keys, values, table, kv_head, chunk, begin, end, places, panel, key_width)
            for query in range(low, high, TOGETHER):
                together = min(TOGETHER, high - query)
                begin, end = bounds[query, 0], bounds[query + together - 1, 1]
                if has_panel:
                    score_chunk_by_panel(keys, words, query, panel, chunk, begin, end, scores, key_width)
                else:
                    given = queries[query:]
                    score_chunk(given, together, keys, values, table, kv_head, chunk, begin, end, scores, key_width)
                soften_chunk(
                    scores, bounds[query:], together, chunk, soft_cap, tops[query:], totals[query:], sums[query:],
                    value_width,
                )  # fmt: skip
                mix_chunk(
                    sums[query:], bounds[query:], together, values, keys, table, kv_head, chunk, scores, key_width,
                    value_width, ahead, ahead_head, stop - 1,
                )  # fmt: skip
        _divide(sums, totals, seen, first_row, rows, group * sharing, sharing, value_width)


@njit(inline="always")
def _turn_queries(
    heads: Any, first_row: int, rows: int, first_head: int, sharing: int, cosines: Any, sines: Any, queries: Any
) -> None:
    for row in range(rows):
        for head in range(sharing):
            place, given = first_row + row, heads[first_row + row, first_head + head]
            _turn(given, cosines[place], sines[place], queries[row * sharing + head])


@njit(inline="always")
def _set_bounds(
    bounds: Any, first_position: int, rows: int, sharing: int, chunk: int, window: int, chunked: int
) -> tuple[int, int]:
    """Set the first position of a chunk that each query attends to and the one after the last. Returns the first query
    that attends to any, and the one after the last."""
    low = high = 0
    for row in range(rows):
        position = first_position + row
        begin, end = max(chunk, _first_key(position, window, chunked)), min(chunk + CHUNK, position + 1)
        for query in range(row * sharing, (row + 1) * sharing):
            bounds[query, 0], bounds[query, 1] = begin, end
        if end <= begin and high == 0:
            low = (row + 1) * sharing
        elif begin < end:
            high = (row + 1) * sharing
    return low, high


@njit(inline="always")
def _most_rows(tiles: Any) -> int:
    """Of a tile."""
    most = 0
    for tile in range(len(tiles)):
        most = max(most, tiles[tile, 3])
    return most


@njit(inline="always")
def _begin(sums: Any, totals: Any, tops: Any, sinks: Any, first_head: int, sharing: int) -> None:
    """Start the sums of queries; a sink is like a first key with its score and a value of zero."""
    has_sinks = len(sinks) > 0
    for query in range(len(tops)):
        totals[query] = np.float32(1 if has_sinks else 0)
        tops[query] = sinks[first_head + query % sharing] if has_sinks else np.float32(-np.inf)
        for channel in range(sums.shape[1]):
            sums[query, channel] = np.float32(0)


@njit(inline="always")
def _first_key(position: int, window: int, chunked: int) -> int:
    """The first position that a query at ``position`` attends to."""
    if chunked > 0:
        return position // chunked * chunked
    return max(0, position - window + 1)


@njit(inline="always")
def _divide(
    sums: Any, totals: Any, seen: Any, first_row: int, rows: int, first_head: int, sharing: int, value_width: int
) -> None:
    """Write the weighted means of the values, in the type of ``seen``."""
    for row in range(rows):
        for head in range(sharing):
            query, result = row * sharing + head, seen[first_row + row, first_head + head]
            for channel in range(value_width):
                result[channel] = narrowed(sums[query, channel] / totals[query], result)
