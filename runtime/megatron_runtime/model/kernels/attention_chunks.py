"""Attention of a few queries to a chunk of positions, step by step, for the code of `attention_kernel`.

Each query has its own bounds in the chunk: the first position that it attends to, and the one after the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from megatron_runtime.model.kernels.attention_instructions import mix_values, score_keys
from megatron_runtime.model.kernels.compiled import exponential
from megatron_runtime.model.kernels.key_panels import score_panel, transpose_keys
from megatron_runtime.model.kernels.softmax_instructions import soften_scores

CHUNK = 64
"""Positions per update of the maximum."""
NEVER = np.float32(-3e38)
"""A score whose exponential does not change a sum."""


@njit(inline="always")
def transpose_chunk(
    keys: Any, values: Any, table: Any, kv_head: int, chunk: int, begin: int, end: int, places: Any, panel: Any,
    key_width: int,
) -> None:  # fmt: skip
    """Write the panel of a chunk's keys from ``begin`` to ``end``, and prefetch the values.

    ``places`` is memory for CHUNK addresses.
    """
    size, key = keys.shape[2], begin
    while key < end:
        block, offset = table[key // size], key % size
        first = keys[block, kv_head, offset].ctypes.data
        for index in range(min(size - offset, end - key)):
            places[key - chunk + index] = first + index * key_width * keys.itemsize
        key += size - offset
    for index in range(begin - chunk):
        places[index] = places[begin - chunk]
    for index in range(end - chunk, CHUNK):
        places[index] = places[end - chunk - 1]
    ahead = values.ctypes.data - keys.ctypes.data
    transpose_keys(keys, key_width, places.ctypes.data, end - chunk, CHUNK, panel.ctypes.data, ahead)


@njit(inline="always")
def score_chunk_by_panel(
    keys: Any, words: Any, query: int, panel: Any, chunk: int, begin: int, end: int, scores: Any, key_width: int
) -> None:
    """Compute the products of TOGETHER queries with the keys of a panel."""
    given, by, to = words.ctypes.data, panel.ctypes.data, scores.ctypes.data
    scale = np.float32(key_width**-0.5)
    score_panel(keys, query, key_width, given, by, begin - chunk, end - chunk, to, CHUNK, scale)


@njit(inline="always")
def score_chunk(
    queries: Any, together: int, keys: Any, values: Any, table: Any, kv_head: int, chunk: int, begin: int, end: int,
    scores: Any, key_width: int,
) -> None:  # fmt: skip
    """Compute the products of queries with the keys from ``begin`` to ``end``, and prefetch the values."""
    scale = np.float32(key_width**-0.5)
    size = keys.shape[2]
    key = begin
    while key < end:
        block, offset = table[key // size], key % size
        count = min(size - offset, end - key)
        first, to = keys[block, kv_head, offset].ctypes.data, scores.ctypes.data + (key - chunk) * 4
        ahead = values[block, kv_head, offset].ctypes.data
        score_keys(keys, together, key_width, queries.ctypes.data, first, count, to, CHUNK, scale, ahead)
        key += count


@njit(inline="always")
def soften_chunk(
    scores: Any, bounds: Any, together: int, chunk: int, soft_cap: Any, tops: Any, totals: Any, sums: Any,
    value_width: int,
) -> None:  # fmt: skip
    """Replace the scores of queries by their exponentials, and scale the previous sums to the new maxima."""
    for query in range(together):
        begin, end = bounds[query, 0] - chunk, bounds[query, 1] - chunk
        if soft_cap != np.float32(0):
            for index in range(begin, end):
                scores[query, index] = _squeeze(scores[query, index], soft_cap)
        for index in range(begin):
            scores[query, index] = NEVER
        for index in range(end, CHUNK):
            scores[query, index] = NEVER
    given, top, total, to = scores.ctypes.data, tops.ctypes.data, totals.ctypes.data, sums.ctypes.data
    soften_scores(together, CHUNK, value_width, given, top, total, to)


@njit(inline="always")
def mix_chunk(
    sums: Any, bounds: Any, together: int, values: Any, keys: Any, table: Any, kv_head: int, chunk: int, shares: Any,
    key_width: int, value_width: int, ahead: int, ahead_head: int, furthest: int,
) -> None:  # fmt: skip
    """Add the weighted values of a chunk to the sums of queries: together those that all see, and each its others.

    Also prefetches keys of the head from position ``ahead`` on, as many, up to ``furthest``.
    """
    size, before = values.shape[2], key_width - value_width
    row_bytes = values.shape[3] * values.itemsize
    begin = bounds[together - 1, 0]
    end = max(begin, bounds[0, 1])
    is_same = bounds[0, 0] == begin and bounds[together - 1, 1] == end
    for part in range(together if is_same else 0, together + 1 if is_same else 2 * together + 1):
        # Before the common ones, these, and after them: each query adds the values in their order.
        query, number, key, last = 0, together, begin, end
        if part < together:
            query, number, key, last = part, 1, bounds[part, 0], min(begin, bounds[part, 1])
        elif part > together:
            query, number, key, last = part - together - 1, 1, end, bounds[part - together - 1, 1]
        while key < last:
            block, offset = table[key // size], key % size
            count = min(size - offset, last - key)
            first = values[block, kv_head, offset, before:].ctypes.data
            following = keys[table[min(ahead + key - chunk, furthest) // size], ahead_head, offset].ctypes.data
            given, to = shares[query, key - chunk :].ctypes.data, sums[query].ctypes.data
            mix_values(values, number, value_width, row_bytes, to, first, count, given, CHUNK, following)
            key += count


@njit(inline="always")
def _squeeze(score: Any, cap: Any) -> Any:
    """``cap * tanh(score / cap)``."""
    two = np.float32(2)
    return cap * (np.float32(1) - two / (exponential(two * score / cap) + np.float32(1)))
