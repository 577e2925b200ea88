"""The softmax of attention, chunk by chunk, generated as LLVM instructions on vectors.

Several queries share the instructions for maxima and sums over the lanes. The result of a query does not depend on the
others, since each lane has the same operations in the same order.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from megatron_runtime.model.kernels.attention_instructions import TOGETHER, Sizes
from megatron_runtime.model.kernels.compiled import LOG2_E, LOG_2, SERIES
from megatron_runtime.model.kernels.vector_instructions import (
    LANES,
    constant,
    each_number,
    floats,
    fused,
    lane_maxima,
    lane_sums,
    larger,
    load,
    offset,
    spread,
    store,
)

_FLOAT_BYTES = 4
_LANE = ir.IntType(32)
_LOWEST = -87.0
"""The exponential of less would not be a normal number."""
_MANTISSA_BITS, _BIAS = 23, 127
_INTEGERS = 1.5 * (1 << _MANTISSA_BITS) + _BIAS
"""A sum with this number is an integer, whose lowest bits are those of the exponent of a power of two."""


def exponential(builder: Any, given: Any) -> Any:
    """e^x of a vector of float32 up to 0, within 2 units in the last place; of NaN it is NaN."""

    def every(value: float) -> Any:
        return constant(given.type, value)

    words = ir.VectorType(_LANE, given.type.count)
    x = builder.select(builder.fcmp_ordered("<", given, every(_LOWEST)), every(_LOWEST), given)
    shifted = fused(builder, x, every(LOG2_E), every(_INTEGERS))
    power = builder.fsub(shifted, every(_INTEGERS))
    rest = fused(builder, power, every(LOG_2[1]), fused(builder, power, every(-LOG_2[0]), x))
    series = every(SERIES[0])
    for coefficient in SERIES[1:]:
        series = fused(builder, series, rest, every(coefficient))
    series = builder.fadd(fused(builder, builder.fmul(series, rest), rest, rest), every(1.0))
    bits = builder.shl(builder.bitcast(shifted, words), constant(words, _MANTISSA_BITS))
    return builder.fmul(series, builder.bitcast(bits, given.type))


def _soften_by_type(
    _: Any, queries: Any, columns: Any, width: Any, scores: Any, tops: Any, totals: Any, sums: Any
) -> Any:
    """Replace the scores of a chunk by their exponentials below the largest score so far, and scale the previous sums.

    Args:
        queries: Their number, at most TOGETHER.
        columns: A literal, the scores of each query, a multiple of LANES.
        width: A literal, the channels of a sum.
        scores: Address of the scores, float32 [queries, columns].
        tops: Address of the largest score of each query before this chunk, float32 [queries]; updated.
        totals: Address of the sum of each query's exponentials, float32 [queries]; updated.
        sums: Address of the weighted sums of values, float32 [queries, width].
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        made = _Softmax(context, builder, columns.literal_value, width.literal_value, *arguments[3:])
        for number in each_number(builder, arguments[0], TOGETHER):
            made.generate(number)
        return context.get_dummy_value()

    return types.void(queries, columns, width, scores, tops, totals, sums), generate


class _Softmax:
    """Generates the code of `soften_scores`, with its arguments."""

    def __init__(
        self, context: Any, builder: Any, columns: int, width: int, scores: Any, tops: Any, totals: Any, sums: Any
    ) -> None:
        self._builder, self._columns, self._width, self._lanes = builder, columns, width, Sizes(context, width).lanes
        self._scores, self._tops, self._totals, self._sums = scores, tops, totals, sums

    def generate(self, queries: int) -> None:
        """The code for a number of queries."""
        builder, rows = self._builder, range(queries)
        before = self._each(self._tops, queries)
        maxima = [reduce(partial(larger, builder), self._scores_of(row)) for row in rows]
        tops = larger(builder, before, lane_maxima(builder, _padded(maxima)))
        fades = exponential(builder, builder.fsub(before, tops))
        added = lane_sums(builder, _padded([self._raise(row, self._lane(tops, row)) for row in rows]))
        totals = fused(builder, self._each(self._totals, queries), fades, added)
        for row in rows:
            store(builder, self._lane(tops, row), self._place(self._tops, row))
            store(builder, self._lane(totals, row), self._place(self._totals, row))
            self._scale_sums(row, self._lane(fades, row))

    def _each(self, base: Any, queries: int) -> Any:
        """A vector of the numbers of some queries."""
        builder = self._builder
        numbers = _padded([load(builder, self._place(base, row), ir.FloatType()) for row in range(queries)])
        made: Any = ir.Constant(floats(len(numbers)), ir.Undefined)
        for lane, number in enumerate(numbers):
            made = builder.insert_element(made, number, _LANE(lane))
        return made

    def _raise(self, row: int, top: Any) -> Any:
        """Replace the scores of a query by their exponentials, and return a vector of partial sums of these."""
        builder, highest, sums = self._builder, spread(self._builder, top), []
        for part, scores in enumerate(self._scores_of(row)):
            sums.append(exponential(builder, builder.fsub(scores, highest)))
            store(builder, sums[-1], self._place(self._scores, row * self._columns + part * LANES))
        return reduce(builder.fadd, sums)

    def _scale_sums(self, row: int, fade: Any) -> None:
        """Multiply the sums of a query."""
        factor = spread(self._builder, fade, self._lanes)
        for channel in range(0, self._width, self._lanes):
            place = self._place(self._sums, row * self._width + channel)
            store(self._builder, self._builder.fmul(load(self._builder, place, factor.type), factor), place)

    def _scores_of(self, row: int) -> list[Any]:
        starts = range(row * self._columns, (row + 1) * self._columns, LANES)
        return [load(self._builder, self._place(self._scores, start), floats(LANES)) for start in starts]

    def _lane(self, vector: Any, lane: int) -> Any:
        return self._builder.extract_element(vector, _LANE(lane))

    def _place(self, base: Any, index: int) -> Any:
        return offset(self._builder, base, base.type(index), _FLOAT_BYTES)


def _padded(each: list[Any]) -> list[Any]:
    """With copies of the last one, so that their number is a power of two."""
    return each + each[-1:] * ((1 << (len(each) - 1).bit_length()) - len(each))


# Called without the typing context, unlike the signature above.
soften_scores: Any = intrinsic(prefer_literal=True)(_soften_by_type)
