"""The innermost loops of low-rank updates, generated as LLVM instructions on vectors.

A few rows are multiplied together, so that a matrix is loaded once for them. Each row has its own sums, in the same
order with the same roundings, however many rows there are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron_runtime.model.kernels.vector_instructions import (
    LANES,
    constant,
    floats,
    fused,
    lane_sum,
    load,
    load_numbers,
    offset,
    spread,
    store,
    store_numbers,
    variable,
)

TOGETHER = 4
"""Rows of A that are multiplied together."""
_FLOAT_BYTES = 4


def _project_by_type(_: Any, rows: Any, array: Any, vectors: Any, inputs: Any, matrix: Any, products: Any) -> Any:
    """Products of a few rows of inputs with TOGETHER rows of a matrix of ``array``'s type.

    ``rows``, their number, is a literal; ``vectors`` is the length of each row, divided by LANES. The others are
    addresses: of the inputs, float32 [rows, length]; of the matrix [TOGETHER, length]; and of the products, float32
    [TOGETHER, rows]. Each lane sums every LANES-th channel, and the sum of the lanes is the product.
    """
    count = rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, _, vectors, inputs, matrix, products = arguments
        zeros = constant(floats(LANES), 0.0)
        pairs = [(line, row) for line in range(TOGETHER) for row in range(count)]
        totals = {pair: variable(builder, zeros) for pair in pairs}
        with cgutils.for_range(builder, vectors) as loop:
            given = [
                load(builder, _place(builder, inputs, row, vectors, loop.index, LANES * _FLOAT_BYTES), zeros.type)
                for row in range(count)
            ]
            for line in range(TOGETHER):
                place = _place(builder, matrix, line, vectors, loop.index, LANES * _item_bytes(array))
                weights = load_numbers(builder, array, place)
                for row in range(count):
                    total = totals[line, row]
                    builder.store(fused(builder, given[row], weights, builder.load(total)), total)
        for place, total in enumerate(totals.values()):
            address = builder.add(products, products.type(place * _FLOAT_BYTES))
            store(builder, lane_sum(builder, builder.load(total)), address)
        return context.get_dummy_value()

    return types.void(rows, array, vectors, inputs, matrix, products), generate


def _expand_by_type(
    _: Any, rows: Any, lanes: Any, array: Any, rank: Any, width: Any, factors: Any, matrix: Any, outputs: Any
) -> Any:
    """Add ``rank`` rows of a matrix, each times a factor, to a few rows of outputs, in ``lanes`` columns.

    ``rows``, the number of rows of outputs, and ``lanes`` are literals. The matrix and the outputs have ``width``
    columns and the type of ``array``. The others are addresses: of the factors, float32 [rank, rows]; of the first
    column in the matrix [rank, width]; and in the outputs [rows, width].
    """
    count, together = rows.literal_value, lanes.literal_value

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, _, _, rank, width, factors, matrix, outputs = arguments
        zeros, size = constant(floats(together), 0.0), _item_bytes(array)
        totals = [variable(builder, zeros) for _ in range(count)]
        with cgutils.for_range(builder, rank) as loop:
            place = offset(builder, matrix, builder.mul(loop.index, width), size)
            weights = load_numbers(builder, array, place, together)
            first = builder.mul(loop.index, width.type(count))
            for row, total in enumerate(totals):
                place = offset(builder, factors, builder.add(first, width.type(row)), _FLOAT_BYTES)
                factor = spread(builder, load(builder, place, ir.FloatType()), together)
                builder.store(fused(builder, factor, weights, builder.load(total)), total)
        for row, total in enumerate(totals):
            place = offset(builder, outputs, builder.mul(width, width.type(row)), size)
            sums = builder.fadd(load_numbers(builder, array, place, together), builder.load(total))
            store_numbers(builder, array, sums, place)
        return context.get_dummy_value()

    return types.void(rows, lanes, array, rank, width, factors, matrix, outputs), generate


# Called without the typing context, unlike the signatures above.
project: Any = intrinsic(prefer_literal=True)(_project_by_type)
expand: Any = intrinsic(prefer_literal=True)(_expand_by_type)


def _item_bytes(array: Any) -> int:
    return int(array.dtype.bitwidth) // 8


def _place(builder: Any, base: Any, line: int, vectors: Any, index: Any, vector_bytes: int) -> Any:
    """Address of a vector of a line, of which each has ``vectors``."""
    first = builder.mul(vectors, vectors.type(line))
    return offset(builder, base, builder.add(first, index), vector_bytes)
