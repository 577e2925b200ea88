"""The innermost loop of products with quantized matrices, generated as LLVM instructions on vectors.

Each lane belongs to one row of the matrix. The integers of a block are summed exactly, and the scaled sums of the
blocks in their order, with the same roundings on every processor. So a result depends neither on the other rows nor on
the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron_runtime.model.formats.coded_rows import BLOCK, QUAD, Coding
from megatron_runtime.model.kernels.integer_sums import Sums, sums_of
from megatron_runtime.model.kernels.vector_instructions import (
    LANES,
    constant,
    floats,
    fused,
    load,
    prefetch,
    spread,
    variable,
)

PARTS = 2
"""Vectors of a panel in memory; each row of a matrix has a lane."""
PANEL = LANES * PARTS
"""Rows of a panel."""
_AHEAD_BYTES = 4096
"""Distance of the codes that are prefetched: with few rows, the time is that of reading the matrix."""
_QUADS = BLOCK // QUAD
_HALF_QUADS = _QUADS // 2

_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_MOST_SUMS = 8
"""Vectors of sums that stay in registers."""


@dataclass(frozen=True)
class Packing:
    """What the layout of a panel depends on: the bits of a code, the columns with a common scale, and mins."""

    bits: int
    group: int
    has_mins: bool

    @classmethod
    def of(cls, coding: Coding) -> Packing:
        """That of a coding."""
        return cls(coding.bits, coding.group, coding.has_mins)

    @property
    def vectors(self) -> int:
        """Vectors of the codes of a block, in each part of a panel: a lane has a word of `stored_blocks`."""
        return self.bits

    @property
    def groups(self) -> int:
        """Scales of a row in a block."""
        return BLOCK // self.group


def _multiply_by_type(
    _: Any,
    bits: Any,
    group: Any,
    has_mins: Any,
    rows: Any,
    blocks: Any,
    codes: Any,
    scales: Any,
    mins: Any,
    inputs: Any,
    input_scales: Any,
    input_starts: Any,
    input_sums: Any,
    outputs: Any,
) -> Any:
    """Products of a few rows of inputs with a panel.

    The first four arguments are literals: the fields of the `Packing`, and the number of rows. ``blocks`` is the number
    of blocks of a row. The others are addresses:

    * of the panel: codes, uint8 [blocks, PARTS, vectors, LANES, QUAD]; scales, float16 [blocks, groups, PANEL]; mins,
      float16 [blocks, PANEL]
    * of the inputs: codes, int8 [blocks, rows, BLOCK]; scales, float32 [blocks, rows]; the integers that their sums
      begin with, int32 [blocks, rows, groups]; the sums by which mins are multiplied, float32 [blocks, rows]
    * of the products, float32 [rows, PANEL]
    """
    packing = Packing(bits.literal_value, group.literal_value, bool(has_mins.literal_value))
    count = rows.literal_value

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        addresses = dict(zip(_ADDRESSES, arguments[5:], strict=True))
        _Loop(builder, packing, count, arguments[4], addresses, *sums_of(context, packing.bits)).generate()
        return context.get_dummy_value()

    numbers = (bits, group, has_mins, rows, blocks, codes, scales, mins)
    return types.void(*numbers, inputs, input_scales, input_starts, input_sums, outputs), generate


# Called without the typing context, unlike the signature above.
multiply_panel: Any = intrinsic(prefer_literal=True)(_multiply_by_type)

_ADDRESSES = ("codes", "scales", "mins", "inputs", "input_scales", "input_starts", "input_sums", "outputs")


class _Loop:
    """Generates the loop over the blocks of a panel."""

    def __init__(
        self, builder: Any, packing: Packing, rows: int, blocks: Any, addresses: dict[str, Any], sums: Sums, lanes: int
    ) -> None:
        self._builder, self._packing, self._rows, self._blocks = builder, packing, rows, blocks
        self._addresses, self._sums, self._lanes = addresses, sums, lanes
        self._parts = PANEL // lanes
        """Vectors of a panel on this processor, of which one in memory may be several."""
        self._ints, self._floats = ir.VectorType(_INT, lanes), floats(lanes)

    def generate(self) -> None:
        together = min(_MOST_SUMS // self._rows, self._parts)
        for first in range(0, self._parts, together):
            self._generate(range(first, first + together))

    def _generate(self, parts: range) -> None:
        """The products with some vectors of the panel."""
        builder = self._builder
        pairs = [(row, part) for row in range(self._rows) for part in parts]
        zeros = constant(self._floats, 0.0)
        totals = {pair: variable(builder, zeros) for pair in pairs}
        with cgutils.for_range(builder, self._blocks) as loop:
            if not parts.start:
                self._prefetch(loop.index)
            self._add_block(loop.index, parts, totals)
        for (row, part), total in totals.items():
            place = self._place("outputs", self._number((row * self._parts + part) * self._lanes * 4), self._floats)
            builder.store(builder.load(total), place, align=4)

    def _prefetch(self, block: Any) -> None:
        block_bytes = PARTS * self._packing.vectors * LANES * QUAD
        ahead = self._sum(self._times(block, block_bytes), _AHEAD_BYTES)
        prefetch(self._builder, self._builder.add(self._addresses["codes"], ahead), block_bytes)

    def _add_block(self, block: Any, parts: range, totals: dict[tuple[int, int], Any]) -> None:
        """Add the products of some vectors of a block."""
        builder, packing = self._builder, self._packing
        if packing.has_mins:
            mins = {part: self._halves("mins", self._sum(self._times(block, self._parts), part)) for part in parts}
            for row in range(self._rows):
                factor = spread(builder, self._load("input_sums", self._item(row, block, 1, 0), _FLOAT), self._lanes)
                for part in parts:
                    total = totals[row, part]
                    builder.store(fused(builder, mins[part], factor, builder.load(total)), total)
        quads, per_group = {part: self._quads(block, part) for part in parts}, _QUADS // packing.groups
        for group in range(packing.groups):
            first = self._sum(self._times(block, packing.groups * self._parts), group * self._parts)
            scales = {part: self._halves("scales", self._sum(first, part)) for part in parts}
            starts = [self._start(row, block, group) for row in range(self._rows)]
            sums = {(row, part): self._sums(builder, start) for row, start in enumerate(starts) for part in parts}
            for quad in range(group * per_group, (group + 1) * per_group):
                codes = {part: quads[part](quad) for part in parts}
                for row in range(self._rows):
                    place = self._item(row, block, _QUADS, quad)
                    shared = spread(builder, self._load("inputs", place, _INT), self._lanes)
                    for part in parts:
                        sums[row, part].add(codes[part], shared)
            for row in range(self._rows):
                factor = spread(builder, self._load("input_scales", self._item(row, block, 1, 0), _FLOAT), self._lanes)
                for part in parts:
                    total = totals[row, part]
                    value = builder.sitofp(sums[row, part].total(), self._floats)
                    scaled = builder.fmul(scales[part], factor)
                    builder.store(fused(builder, value, scaled, builder.load(total)), total)

    def _start(self, row: int, block: Any, group: int) -> Any:
        """The integers that the sums of a row begin with."""
        place = self._item(row, block, self._packing.groups, group)
        return spread(self._builder, self._load("input_starts", place, _INT), self._lanes)

    def _quads(self, block: Any, part: int) -> Callable[[int], Any]:
        """``quads(n)``: the codes of the columns 4 n to 4 n + 3 of a block as unsigned bytes, a row in each lane."""
        builder, packing = self._builder, self._packing
        stored, lane = divmod(part * self._lanes, LANES)
        first = self._sum(self._times(block, PARTS * packing.vectors), stored * packing.vectors)

        def vector(index: int) -> Any:
            place = self._times(self._sum(first, index), LANES * QUAD)
            return self._load("codes", self._sum(place, lane * QUAD), self._ints)

        def bits(value: Any, shift: int, count: int) -> Any:
            """``count`` bits of each byte."""
            mask = constant(self._ints, ((1 << count) - 1) * 0x01010101)
            return builder.and_(builder.lshr(value, constant(self._ints, shift)), mask)

        def quad(index: int) -> Any:
            if packing.bits == 8:
                return vector(index)
            low = bits(vector(index % _HALF_QUADS), 4 * (index // _HALF_QUADS), 4)
            if packing.bits == 4:
                return low
            count = packing.bits - 4
            place = index * count
            high = bits(vector(_HALF_QUADS + place // 8), place % 8, count)
            return builder.or_(low, builder.shl(high, constant(self._ints, 4)))

        return quad

    def _item(self, row: int, block: Any, per_block: int, index: int) -> Any:
        """Offset in bytes of a number of 32 bits, of which each block of a row has ``per_block``."""
        return self._times(self._sum(self._times(block, per_block * self._rows), row * per_block + index), 4)

    def _halves(self, name: str, index: Any) -> Any:
        """A vector of float16 as float32."""
        halves = self._load(name, self._times(index, self._lanes * 2), ir.VectorType(ir.HalfType(), self._lanes))
        return self._builder.fpext(halves, self._floats)

    def _load(self, name: str, offset: Any, kind: Any) -> Any:
        return load(self._builder, self._builder.add(self._addresses[name], offset), kind)

    def _place(self, name: str, offset: Any, kind: Any) -> Any:
        return self._builder.inttoptr(self._builder.add(self._addresses[name], offset), kind.as_pointer())

    def _number(self, value: int) -> Any:
        return ir.Constant(self._blocks.type, value)

    def _times(self, value: Any, factor: int) -> Any:
        return self._builder.mul(value, self._number(factor))

    def _sum(self, value: Any, other: int) -> Any:
        return self._builder.add(value, self._number(other))
