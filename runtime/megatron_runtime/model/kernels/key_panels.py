"""Scores of many queries with a chunk of keys that is transposed first, generated as LLVM instructions on vectors.

A vector then has a channel of several keys, so that no lanes are left to be added. The bits are those of `score_keys`,
whose order of sums this keeps: channels at a distance of a vector first, and then as a binary tree. The partial sums
of that tree take more registers than processors without AVX-512 have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron_runtime.cpu_features import has_wide_vectors
from megatron_runtime.model.kernels.attention_instructions import TOGETHER, Sizes, has_pair_dots
from megatron_runtime.model.kernels.vector_instructions import (
    LANES,
    ChannelDot,
    PairDot,
    constant,
    floats,
    load,
    load_numbers,
    offset,
    prefetch,
    shuffled,
    spread,
    store,
)

WIDEST = 256
"""Channels of the widest keys: the panel of wider ones would not stay in a cache beside the values."""
_WORD_BYTES = 4
_NUMBER, _WORD = ir.IntType(64), ir.IntType(32)


def can_transpose(key_width: int) -> bool:
    """Whether keys of this width fill vectors of AVX-512, and panels of them fit in a cache. For others no code is
    generated."""
    return has_wide_vectors() and key_width % LANES == 0 and key_width <= WIDEST


class _Words:
    """How channels become words of 32 bits: float32, or the pairs of bfloat16 that one instruction multiplies."""

    def __init__(self, context: Any, array: Any, width: int) -> None:
        self._array, self._are_pairs = array, has_pair_dots(context, array, width)
        self.lanes = Sizes(context, width).lanes
        self.channels = 2 if self._are_pairs else 1
        self.number = width // self.channels
        """Of a query or key."""
        self.kind = _WORD if self._are_pairs else ir.FloatType()
        self.dot: Any = PairDot() if self._are_pairs else ChannelDot(array, self.lanes)

    def load(self, builder: Any, row: Any, word: Any) -> Any:
        """The words of a query or key, whose address is ``row``, from this one on."""
        place = offset(builder, row, word, self.channels * self._array.dtype.bitwidth // 8)
        if self._are_pairs:
            return load(builder, place, ir.VectorType(_WORD, self.lanes))
        return load_numbers(builder, self._array, place, self.lanes)


def _transpose_by_type(
    _: Any, array: Any, width: Any, places: Any, count: Any, columns: Any, panel: Any, ahead: Any
) -> Any:
    """Write a panel of keys: words [width or half of it, columns].

    Args:
        array: Of the type of the keys: float32, or the bits of bfloat16.
        width: A literal, the channels; see `can_transpose`.
        places: Address of the addresses of the keys, int64 [columns], all of them valid.
        count: Number of keys, at most ``columns``; the panel gets up to a vector more.
        columns: A literal, a multiple of LANES.
        panel: Address of the panel.
        ahead: Distance from each key to as much memory, which is prefetched meanwhile.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, _, places, count, _, panel, ahead = arguments
        if not can_transpose(width.literal_value):
            return context.get_dummy_value()
        words, row_bytes = _Words(context, array, width.literal_value), width.literal_value * array.dtype.bitwidth // 8
        lanes = words.lanes
        groups = builder.udiv(builder.add(count, _NUMBER(lanes - 1)), _NUMBER(lanes))
        with cgutils.for_range(builder, groups) as group:
            first = builder.mul(group.index, _NUMBER(lanes))
            rows = [
                load(builder, offset(builder, places, builder.add(first, _NUMBER(lane)), 8), _NUMBER)
                for lane in range(lanes)
            ]
            for row in rows:
                prefetch(builder, builder.add(row, ahead), row_bytes)
            with cgutils.for_range(builder, _NUMBER(words.number // lanes)) as part:
                word = builder.mul(part.index, _NUMBER(lanes))
                lines = _transposed(builder, [words.load(builder, row, word) for row in rows])
                for number, line in enumerate(lines):
                    at = builder.mul(builder.add(word, _NUMBER(number)), _NUMBER(columns.literal_value))
                    store(builder, line, offset(builder, panel, builder.add(at, first), _WORD_BYTES))
        return context.get_dummy_value()

    return types.void(array, width, places, count, columns, panel, ahead), generate


def _transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """The columns of a square matrix, of which each vector is a row: exchanges squares of half the size, and so on."""
    made, size = list(rows), len(rows)
    width = size // 2
    while width:
        for low in (index for index in range(size) if not index & width):
            one, other = made[low], made[low + width]
            made[low], made[low + width] = (
                shuffled(builder, one, other, [_source(lane, width, size, upper) for lane in range(size)])
                for upper in (0, width)
            )
        width //= 2
    return made


def _source(lane: int, width: int, size: int, upper: int) -> int:
    """The lane of two vectors of ``size`` lanes that becomes this lane of the first or the second one."""
    if lane & width:
        return size + lane - width + upper
    return lane + upper


def _prepare_by_type(_: Any, array: Any, width: Any, queries: Any, query: Any, words: Any) -> Any:
    """Copy queries as words.

    Args:
        array: Of the type of the queries: float32, or the bits of bfloat16.
        width: A literal, the channels.
        queries: Their number.
        query: Address of the queries, [queries, width].
        words: Address of the copy, words [queries, width or half of it].
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, _, queries, query, words = arguments
        if not can_transpose(width.literal_value):
            return context.get_dummy_value()
        made = _Words(context, array, width.literal_value)
        # The rows follow each other without gaps.
        vectors = builder.mul(queries, _NUMBER(made.number // made.lanes))
        with cgutils.for_range(builder, vectors) as loop:
            word = builder.mul(loop.index, _NUMBER(made.lanes))
            store(builder, made.load(builder, query, word), offset(builder, words, word, _WORD_BYTES))
        return context.get_dummy_value()

    return types.void(array, width, queries, query, words), generate


def _score_by_type(
    _: Any,
    array: Any,
    query: Any,
    width: Any,
    words: Any,
    panel: Any,
    first: Any,
    last: Any,
    scores: Any,
    columns: Any,
    scale: Any,
) -> Any:
    """Scaled products of TOGETHER queries with the keys of a panel.

    Args:
        array: Of the type of the keys: float32, or the bits of bfloat16.
        query: The first of the queries.
        width: A literal, the channels.
        words: Address of the words of all queries.
        panel: Address of the panel.
        first, last: The first key and the one after the last. Those beside them that share vectors are computed too.
        scores: Address of the result, float32 [TOGETHER, columns].
        columns: A literal, those of the panel and of the result.
        scale: float32, the factor.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, query, _, words, panel, first, last, scores, _, scale = arguments
        if not can_transpose(width.literal_value):
            return context.get_dummy_value()
        made = _PanelScores(builder, _Words(context, array, width.literal_value), columns.literal_value)
        given = offset(builder, words, query, made.words.number * _WORD_BYTES)
        lanes = _NUMBER(made.lanes)
        begin, end = builder.udiv(first, lanes), builder.udiv(builder.add(last, _NUMBER(made.lanes - 1)), lanes)
        with cgutils.for_range(builder, builder.sub(end, begin)) as loop:
            column = builder.mul(builder.add(begin, loop.index), lanes)
            to = offset(builder, scores, column, _WORD_BYTES)
            made.generate(given, offset(builder, panel, column, _WORD_BYTES), to, scale)
        return context.get_dummy_value()

    return types.void(array, query, width, words, panel, first, last, scores, columns, scale), generate


class _PanelScores:
    """Generates the code of `score_panel` for a vector of keys."""

    def __init__(self, builder: Any, words: _Words, columns: int) -> None:
        self._builder, self.words, self._columns = builder, words, columns
        self.lanes = words.lanes

    def generate(self, query: Any, panel: Any, scores: Any, scale: Any) -> None:
        """The scores of the queries with the keys whose first words are at ``panel``."""
        builder = self._builder
        factor = spread(builder, scale, self.lanes)
        sums = self._tree(0, 1, lambda lane: self._add(query, panel, lane))
        for row, total in enumerate(sums):
            place = builder.add(scores, _NUMBER(row * self._columns * _WORD_BYTES))
            store(builder, builder.fmul(total, factor), place)

    def _tree(self, lane: int, width: int, sums_of: Callable[[int], list[Any]]) -> list[Any]:
        """The sums of the lanes at multiples of ``width`` from ``lane``, in the order of `lane_sums`."""
        if width == self.lanes:
            return sums_of(lane)
        one, other = (self._tree(lane + half * width, 2 * width, sums_of) for half in (0, 1))
        return [self._builder.fadd(low, high) for low, high in zip(one, other, strict=True)]

    def _add(self, query: Any, panel: Any, lane: int) -> list[Any]:
        """The sums over the words at a distance of a vector of channels from ``lane`` on, of each query."""
        builder, words = self._builder, self.words
        sums = [constant(floats(self.lanes), 0.0)] * TOGETHER
        for word in range(lane, words.number, self.lanes):
            at = builder.add(panel, _NUMBER(word * self._columns * _WORD_BYTES))
            keys = load(builder, at, ir.VectorType(words.kind, self.lanes))
            for row in range(TOGETHER):
                place = builder.add(query, _NUMBER((row * words.number + word) * _WORD_BYTES))
                given = spread(builder, load(builder, place, words.kind), self.lanes)
                sums[row] = words.dot.add(builder, sums[row], given, keys)
        return sums


# Called without the typing context, unlike the signatures above.
transpose_keys: Any = intrinsic(prefer_literal=True)(_transpose_by_type)
prepare_queries: Any = intrinsic(prefer_literal=True)(_prepare_by_type)
score_panel: Any = intrinsic(prefer_literal=True)(_score_by_type)
