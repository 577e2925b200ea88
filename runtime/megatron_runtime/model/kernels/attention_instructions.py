"""The innermost loops of attention, generated as LLVM instructions on vectors.

Several queries share the loads of a key or a value, and several keys the sums over the lanes. The order of a query's
sums depends on neither: each lane adds its channels in their order, and the lanes are added as a binary tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron_runtime.model.kernels.vector_instructions import (
    LANES,
    ChannelDot,
    PairDot,
    constant,
    each_number,
    floats,
    fused,
    has_feature,
    lane_sums,
    load,
    load_numbers,
    offset,
    prefetch,
    spread,
    store,
    variable,
)

TOGETHER = 4
"""Maximum of queries that share loads."""
_FLOAT_BYTES = 4
_UNROLLED = 16
"""Vectors of channels without a loop."""
_NUMBER = ir.IntType(64)


class Sizes:
    """What fits in the registers of a processor."""

    def __init__(self, context: Any, width: int) -> None:
        has_wide_registers = has_feature(context, "avx512f")
        most = LANES if has_wide_registers else LANES // 2
        self.lanes = next(lanes for lanes in (16, 8, 4, 2, 1) if lanes <= most and width % lanes == 0)
        self.keys = 4 if has_wide_registers else 2
        """That share the sums over the lanes."""
        self.parts = 4 if has_wide_registers else 2
        """Vectors of a value that are summed together."""


def has_pair_dots(context: Any, array: Any, channels: int) -> bool:
    """Whether the processor multiplies pairs of channels in bfloat16, and these many are full vectors of them."""
    is_narrow = isinstance(array.dtype, types.Integer)
    return is_narrow and channels % PairDot.channels == 0 and has_feature(context, "avx512bf16")


def _score_by_type(
    _: Any,
    array: Any,
    queries: Any,
    width: Any,
    query: Any,
    key: Any,
    count: Any,
    scores: Any,
    columns: Any,
    scale: Any,
    ahead: Any,
) -> Any:
    """Scaled products of queries with consecutive keys.

    Args:
        array: Of the type of queries and keys: float32, or the bits of bfloat16.
        queries: Number of queries, at most TOGETHER.
        width: A literal, the channels.
        query: Address of the queries, [queries, width].
        key: Address of the keys, [count, width].
        count: Number of keys.
        scores: Address of the result, float32 [queries, columns], of which the first ``count`` columns are written.
        columns: Those of the result.
        scale: float32, the factor.
        ahead: Address of as much memory as the keys have, which is prefetched meanwhile.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, together, _, *others = arguments
        made = _Scores(context, builder, array, width.literal_value, *others)
        for number in each_number(builder, together, TOGETHER):
            _in_groups(builder, made.count, made.sizes.keys, partial(made.generate, number))
        return context.get_dummy_value()

    return types.void(array, queries, width, query, key, count, scores, columns, scale, ahead), generate


class _Scores:
    """Generates the code of `score_keys`, with its arguments."""

    def __init__(
        self, context: Any, builder: Any, array: Any, width: int, query: Any, key: Any, count: Any, scores: Any,
        columns: Any, scale: Any, ahead: Any,
    ) -> None:  # fmt: skip
        self._builder, self._width, self._item = builder, width, array.dtype.bitwidth // 8
        self._query, self._key, self.count, self._scores = query, key, count, scores
        self._columns, self._scale, self._ahead = columns, scale, ahead
        self.sizes = Sizes(context, width)
        self._dot = PairDot() if has_pair_dots(context, array, width) else ChannelDot(array, self.sizes.lanes)

    def generate(self, queries: int, first: Any, keys: int) -> None:
        """The products of some queries with some keys, the first of which has this index."""
        builder, row_bytes = self._builder, self._width * self._item
        begin = builder.mul(first, _NUMBER(row_bytes))
        prefetch(builder, builder.add(self._ahead, begin), keys * row_bytes)
        zeros = constant(floats(self.sizes.lanes), 0.0)
        sums = [[variable(builder, zeros) for _ in range(keys)] for _ in range(queries)]
        key = builder.add(self._key, begin)
        parts = self._width // self._dot.channels
        _for_each(builder, parts, lambda part: self._add(sums, key, builder.mul(part, _NUMBER(self._dot.channels))))
        for row in range(queries):
            products = lane_sums(builder, [builder.load(total) for total in sums[row]])
            scaled = builder.fmul(products, spread(builder, self._scale, keys))
            index = builder.add(builder.mul(self._columns, _NUMBER(row)), first)
            store(builder, scaled, offset(builder, self._scores, index, _FLOAT_BYTES))

    def _add(self, sums: Sequence[Sequence[Any]], key: Any, channel: Any) -> None:
        """Add the products from this channel on to the sums [queries][keys]; ``key`` is the first key's address."""
        builder, row_bytes = self._builder, self._width * self._item
        at = offset(builder, key, channel, self._item)
        loaded = [self._dot.load(builder, builder.add(at, _NUMBER(each * row_bytes))) for each in range(len(sums[0]))]
        place = offset(builder, self._query, channel, self._item)
        for row, totals in enumerate(sums):
            factor = self._dot.load(builder, builder.add(place, _NUMBER(row * row_bytes)))
            for total, one in zip(totals, loaded, strict=True):
                builder.store(self._dot.add(builder, builder.load(total), factor, one), total)


def _mix_by_type(
    _: Any,
    array: Any,
    queries: Any,
    width: Any,
    row_bytes: Any,
    sums: Any,
    value: Any,
    count: Any,
    shares: Any,
    columns: Any,
    ahead: Any,
) -> Any:
    """Add the weighted values of consecutive positions to the sums of queries.

    Args:
        array: Of the type of the values: float32, or the bits of bfloat16.
        queries: Number of queries, at most TOGETHER.
        width: A literal, the channels of a value.
        row_bytes: From a value to the next one.
        sums: Address of the sums, float32 [queries, width].
        value: Address of the first value.
        count: Number of values.
        shares: Address of the weights, float32 [queries, columns], of which the first ``count`` columns are used.
        columns: Those of the weights.
        ahead: Address of as much memory as the values have, which is prefetched meanwhile.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, together, _, *others = arguments
        made = _Mix(context, builder, array, width.literal_value, *others)
        for number in each_number(builder, together, TOGETHER):
            made.generate(number)
        return context.get_dummy_value()

    return types.void(array, queries, width, row_bytes, sums, value, count, shares, columns, ahead), generate


class _Mix:
    """Generates the code of `mix_values`, with its arguments."""

    def __init__(
        self, context: Any, builder: Any, array: Any, width: int, row_bytes: Any, sums: Any, value: Any, count: Any,
        shares: Any, columns: Any, ahead: Any,
    ) -> None:  # fmt: skip
        self._builder, self._array, self._width, self._item = builder, array, width, array.dtype.bitwidth // 8
        self._row_bytes, self._sums, self._value, self._count = row_bytes, sums, value, count
        self._shares, self._columns, self._ahead = shares, columns, ahead
        self._sizes = Sizes(context, width)

    def generate(self, queries: int) -> None:
        """The sums of all channels, some vectors at a time."""
        vectors, most = self._width // self._sizes.lanes, self._sizes.parts
        for start in range(0, vectors, most):
            self._add(queries, start * self._sizes.lanes, min(most, vectors - start))

    def _add(self, queries: int, channel: int, vectors: int) -> None:
        """Add some vectors of the values, the first of which begins with this channel."""
        builder, lanes = self._builder, self._sizes.lanes
        places = [
            [_NUMBER((row * self._width + channel + part * lanes) * _FLOAT_BYTES) for part in range(vectors)]
            for row in range(queries)
        ]
        addresses = [[builder.add(self._sums, place) for place in line] for line in places]
        totals = [[variable(builder, load(builder, each, floats(lanes))) for each in line] for line in addresses]
        with cgutils.for_range(builder, self._count) as loop:
            self._add_value(totals, loop.index, channel)
        for line, variables in zip(addresses, totals, strict=True):
            for address, total in zip(line, variables, strict=True):
                store(builder, builder.load(total), address)

    def _add_value(self, totals: Sequence[Sequence[Any]], index: Any, channel: int) -> None:
        """Add one value to the totals [queries][vectors]."""
        builder, lanes, vectors = self._builder, self._sizes.lanes, len(totals[0])
        begin = builder.add(builder.mul(index, self._row_bytes), _NUMBER(channel * self._item))
        prefetch(builder, builder.add(self._ahead, begin), vectors * lanes * self._item)
        at = builder.add(self._value, begin)
        loaded = [
            load_numbers(builder, self._array, builder.add(at, _NUMBER(part * lanes * self._item)), lanes)
            for part in range(vectors)
        ]
        for row, line in enumerate(totals):
            place = builder.add(builder.mul(self._columns, _NUMBER(row)), index)
            share = load(builder, offset(builder, self._shares, place, _FLOAT_BYTES), ir.FloatType())
            factor = spread(builder, share, lanes)
            for total, value in zip(line, loaded, strict=True):
                builder.store(fused(builder, factor, value, builder.load(total)), total)


# Called without the typing context, unlike the signatures above.
score_keys: Any = intrinsic(prefer_literal=True)(_score_by_type)
mix_values: Any = intrinsic(prefer_literal=True)(_mix_by_type)


def _for_each(builder: Any, count: int, generate: Callable[[Any], None]) -> None:
    """Generate code for each number below ``count``: a loop if there are many."""
    if count <= _UNROLLED:
        for number in range(count):
            generate(_NUMBER(number))
        return
    with cgutils.for_range(builder, _NUMBER(count)) as loop:
        generate(loop.index)


def _in_groups(builder: Any, count: Any, size: int, generate: Callable[[Any, int], None]) -> None:
    """Generate code for as many groups of ``size`` as fit in ``count``, and for each of the rest: the first, and how
    many."""
    groups = builder.udiv(count, _NUMBER(size))
    with cgutils.for_range(builder, groups) as loop:
        generate(builder.mul(loop.index, _NUMBER(size)), size)
    done = builder.mul(groups, _NUMBER(size))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        generate(builder.add(done, loop.index), 1)
