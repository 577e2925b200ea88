"""The innermost loop of products of activations with a matrix, generated as LLVM instructions on vectors.

A panel of a matrix is multiplied with some rows of inputs. Each sum is in one lane of a vector, and adds the channels
in their order, whatever other rows and columns there are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron_runtime.model.kernels.vector_instructions import (
    LANES,
    LINE_BYTES,
    ChannelDot,
    PairDot,
    constant,
    each_number,
    floats,
    has_feature,
    load,
    load_numbers,
    offset,
    prefetch,
    spread,
    store,
    store_numbers,
    variable,
)

ROWS = 12
"""Maximum of rows that are multiplied together: their sums and a part of the panel fill the registers of AVX-512. With
the registers of AVX2, the sums of half the rows and half the panel's columns at a time do."""
PARTS = 2
"""Vectors of a panel's columns."""
COLUMNS = PARTS * LANES
WORD_BYTES = 4
"""Of one channel in float32, or two in bfloat16."""
_FLOAT_BYTES = 4


def _multiply_by_type(
    _: Any,
    array: Any,
    rows: Any,
    words: Any,
    inputs: Any,
    row_bytes: Any,
    panel: Any,
    ahead: Any,
    stride: Any,
    second: Any,
    products: Any,
) -> Any:
    """Products of some rows of inputs with a panel.

    Args:
        array: Of the type of inputs and panel: float32, or the bits of bfloat16.
        rows: Their number, at most ROWS.
        words: Of each row: its channels in float32, and pairs of channels in bfloat16.
        inputs: Address of the first row.
        row_bytes: From a row to the next one.
        panel: Address of the panel, [words, COLUMNS] words.
        ahead: Address of memory to prefetch meanwhile.
        stride: Bytes from a line that is prefetched with a word to the one of the next word.
        second: Distance of a second line of each word.
        products: Address of the products, float32 [rows, COLUMNS].
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        has_wide_registers = has_feature(context, "avx512f")
        made = _Products(builder, array, has_wide_registers, *arguments[2:])
        for number in each_number(builder, arguments[1], ROWS):
            made.generate(number)
        return context.get_dummy_value()

    return types.void(array, rows, words, inputs, row_bytes, panel, ahead, stride, second, products), generate


class _Products:
    """Generates the code of `multiply_words`, with its arguments."""

    def __init__(
        self, builder: Any, array: Any, has_wide_registers: bool, words: Any, inputs: Any, row_bytes: Any, panel: Any,
        ahead: Any, stride: Any, second: Any, products: Any,
    ) -> None:  # fmt: skip
        self._builder, self._words, self._inputs, self._row_bytes = builder, words, inputs, row_bytes
        self._panel, self._products = panel, products
        self._ahead, self._stride, self._second = ahead, stride, second
        is_narrow = isinstance(array.dtype, types.Integer)
        self._dot = PairDot() if is_narrow else ChannelDot(array, LANES)
        self._word = ir.IntType(32) if is_narrow else ir.FloatType()
        self._most_rows, self._most_parts = (ROWS, PARTS) if has_wide_registers else (ROWS // 2, PARTS // 2)
        """Whose sums stay in registers."""

    def generate(self, rows: int) -> None:
        """The products of a number of rows."""
        turns = -(-rows // self._most_rows)
        for turn in range(turns):
            for part in range(0, PARTS, self._most_parts):
                numbers = range(turn * rows // turns, (turn + 1) * rows // turns)
                self._generate(numbers, range(part, part + self._most_parts), prefetches=turn == 0)

    def _generate(self, rows: range, parts: range, *, prefetches: bool) -> None:
        """The products of some rows with some vectors of the panel's columns."""
        builder, zeros = self._builder, constant(floats(LANES), 0.0)
        sums = [[variable(builder, zeros) for _ in parts] for _ in rows]
        lines = [builder.add(self._inputs, builder.mul(self._row_bytes, self._number(row))) for row in rows]
        with cgutils.for_range(builder, self._words) as loop:
            if prefetches:
                self._prefetch(loop.index, parts)
            self._add(sums, lines, parts, loop.index)
        for row, totals in zip(rows, sums, strict=True):
            for part, total in zip(parts, totals, strict=True):
                place = builder.add(self._products, self._number((row * PARTS + part) * LANES * _FLOAT_BYTES))
                store(builder, builder.load(total), place)

    def _prefetch(self, word: Any, parts: range) -> None:
        """Prefetch a line for each part, of which the second one is ``second`` bytes away."""
        builder = self._builder
        ahead = builder.add(self._ahead, builder.mul(word, self._stride))
        lines = ahead, builder.add(ahead, self._second)
        for part in parts:
            prefetch(builder, lines[part], LINE_BYTES)

    def _add(self, sums: list[list[Any]], lines: list[Any], parts: range, word: Any) -> None:
        """Add the products of a word of each row, whose addresses are ``lines``."""
        builder = self._builder
        kind, at = ir.VectorType(self._word, LANES), offset(builder, self._panel, word, COLUMNS * WORD_BYTES)
        weights = [load(builder, builder.add(at, self._number(part * LINE_BYTES)), kind) for part in parts]
        for line, totals in zip(lines, sums, strict=True):
            given = spread(builder, load(builder, offset(builder, line, word, WORD_BYTES), self._word))
            for total, weight in zip(totals, weights, strict=True):
                builder.store(self._dot.add(builder, builder.load(total), given, weight), total)

    def _number(self, value: int) -> Any:
        return self._words.type(value)


def _round_by_type(_: Any, array: Any, has_bias: Any, products: Any, bias: Any, outputs: Any) -> Any:
    """Write COLUMNS products, float32, plus a bias, as numbers of ``array``'s type, if ``has_bias`` (a literal)."""
    item = array.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        products, bias, outputs = arguments[2:]
        number = products.type
        for start in range(0, COLUMNS, LANES):
            sums = load(builder, builder.add(products, number(_FLOAT_BYTES * start)), floats(LANES))
            if has_bias.literal_value:
                added = load_numbers(builder, array, builder.add(bias, number(item * start)))
                sums = builder.fadd(sums, added)
            store_numbers(builder, array, sums, builder.add(outputs, number(item * start)))
        return context.get_dummy_value()

    return types.void(array, has_bias, products, bias, outputs), generate


# Called without the typing context, unlike the signatures above.
multiply_words: Any = intrinsic(prefer_literal=True)(_multiply_by_type)
round_products: Any = intrinsic(prefer_literal=True)(_round_by_type)
