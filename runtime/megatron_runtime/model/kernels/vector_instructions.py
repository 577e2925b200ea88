"""LLVM instructions on vectors, for code that generates the innermost loop of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 16
"""Numbers of 32 bits in a vector of 512 bits."""

LINE_BYTES = 64
_READ, _KEEP, _DATA = 0, 3, 1
"""Arguments of LLVM's prefetch: not to write, into the first-level cache, and no instructions."""
_SHORT, _INT, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


def has_feature(context: Any, name: str) -> bool:
    """Whether the processor for which numba compiles has a feature, by LLVM's name."""
    return f"+{name}" in context.codegen().magic_tuple()[2].split(",")


def floats(lanes: int) -> Any:
    """The type of a vector of float32."""
    return ir.VectorType(_FLOAT, lanes)


def constant(kind: Any, value: float) -> Any:
    """A vector of a type whose lanes all have a constant value."""
    return ir.Constant(kind, [value] * kind.count)


def spread(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector whose lanes all have a value."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, _INT(0))
    return builder.shuffle_vector(first, undefined, constant(ir.VectorType(_INT, lanes), 0))


def load(builder: Any, address: Any, kind: Any) -> Any:
    """A value of a type at an address, which need not be aligned."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def load_numbers(builder: Any, array: Any, address: Any, lanes: int = LANES) -> Any:
    """Numbers at an address as float32; the type of ``array`` says whether they are float32, or bits of bfloat16."""
    if not isinstance(array.dtype, types.Integer):
        return load(builder, address, floats(lanes))
    words = ir.VectorType(_INT, lanes)
    stored = builder.zext(load(builder, address, ir.VectorType(_SHORT, lanes)), words)
    return builder.bitcast(builder.shl(stored, constant(words, 16)), floats(lanes))


def store_numbers(builder: Any, array: Any, numbers: Any, address: Any) -> None:
    """Write float32 as `load_numbers` reads it; bfloat16 is rounded to nearest, half to even."""
    kept = numbers
    if isinstance(array.dtype, types.Integer):
        words, shorts = ir.VectorType(_INT, numbers.type.count), ir.VectorType(_SHORT, numbers.type.count)
        bits, sixteen = builder.bitcast(numbers, words), constant(words, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), constant(words, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, constant(words, 0x7FFF)), odd), sixteen)
        # Rounding up could turn the bits of a NaN into another number.
        is_number = builder.fcmp_ordered("ord", numbers, numbers)
        kept = builder.trunc(builder.select(is_number, rounded, constant(words, 0x7FC0)), shorts)
    builder.store(kept, builder.inttoptr(address, kept.type.as_pointer()), align=1)


def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """The result, of a type, of one of LLVM's intrinsic functions, whose name has no "llvm." here."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.declare_intrinsic(f"llvm.{name}", fnty=kind), arguments)


def fused(builder: Any, factor: Any, other: Any, added: Any) -> Any:
    """``factor * other + added``: one instruction where the processor has it, and one rounding everywhere."""
    return call_intrinsic(builder, f"fma.v{factor.type.count}f32", factor.type, factor, other, added)


def offset(builder: Any, base: Any, index: Any, item_bytes: int) -> Any:
    """The address of an item, of which the first one is at ``base``."""
    return builder.add(base, builder.mul(index, index.type(item_bytes)))


def store(builder: Any, value: Any, address: Any) -> None:
    """Write a value at an address, which need not be aligned."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def prefetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Fetch the cache lines of some memory, which begins a line if it has several."""
    pointer = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
    )
    for start in range(0, num_bytes, LINE_BYTES):
        place = builder.inttoptr(builder.add(address, address.type(start)), pointer)
        builder.call(function, [place, *(_INT(kind) for kind in (_READ, _KEEP, _DATA))])


def variable(builder: Any, value: Any) -> Any:
    """A place for a value, which is a register if all indices are constant."""
    return cgutils.alloca_once_value(builder, value)  # type: ignore[no-untyped-call]


def each_number(builder: Any, number: Any, most: int) -> Iterator[int]:
    """Each value of a number from 1 to ``most``; the code that is generated meanwhile runs if it is this one."""
    for value in range(1, most + 1):
        with builder.if_then(builder.icmp_signed("==", number, number.type(value))):
            yield value


class ChannelDot:
    """Each lane adds the products of one channel in float32."""

    def __init__(self, array: Any, lanes: int) -> None:
        self._array = array
        self.channels = lanes
        """That one instruction multiplies."""

    def load(self, builder: Any, address: Any) -> Any:
        """Channels at an address."""
        return load_numbers(builder, self._array, address, self.channels)

    def add(self, builder: Any, sums: Any, one: Any, other: Any) -> Any:
        """The sums with the products."""
        return fused(builder, one, other, sums)


class PairDot:
    """The same for two channels in bfloat16, by VDPBF16PS (AVX512-BF16)."""

    channels = 2 * LANES
    _pairs = ir.VectorType(ir.IntType(32), LANES)

    def load(self, builder: Any, address: Any) -> Any:
        """Pairs of channels at an address."""
        return load(builder, address, self._pairs)

    def add(self, builder: Any, sums: Any, one: Any, other: Any) -> Any:
        """The sums with the products of pairs."""
        return call_intrinsic(builder, "x86.avx512bf16.dpbf16ps.512", sums.type, sums, one, other)


def lane_sum(builder: Any, vector: Any) -> Any:
    """The sum of the lanes, of which there are a power of two, in the order of a binary tree."""
    return builder.extract_element(lane_sums(builder, [vector]), _INT(0))


def lane_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """A vector of the sums of the lanes of each vector; both numbers are powers of two.

    The vectors share instructions, but each sum has the order of `lane_sum`.
    """
    return _over_lanes(builder, vectors, builder.fadd)


def lane_maxima(builder: Any, vectors: Sequence[Any]) -> Any:
    """A vector of the largest lane of each vector; both numbers are powers of two. With a NaN, any of the lanes."""
    return _over_lanes(builder, vectors, partial(larger, builder))


def larger(builder: Any, one: Any, other: Any) -> Any:
    """The larger number in each lane, and of ``other`` if one of both is NaN."""
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _over_lanes(builder: Any, vectors: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    parts, width = list(vectors), vectors[0].type.count
    while width > 1:
        width //= 2
        pairs = zip(parts[::2], parts[1::2], strict=True) if len(parts) > 1 else ((parts[0], None),)
        parts = [combine(*_halves(builder, one, other, width)) for one, other in pairs]
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        parts = [shuffled(builder, one, other, lanes) for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _halves(builder: Any, one: Any, other: Any | None, width: int) -> tuple[Any, Any]:
    """The first and the second halves of each group of ``2 * width`` lanes of one vector or two."""
    count = one.type.count * (1 if other is None else 2)
    starts = range(0, count, 2 * width)
    low, high = (
        shuffled(builder, one, other, [start + half + lane for start in starts for lane in range(width)])
        for half in (0, width)
    )
    return low, high


def shuffled(builder: Any, one: Any, other: Any | None, lanes: Sequence[int]) -> Any:
    """These lanes of one vector and another."""
    second = ir.Constant(one.type, ir.Undefined) if other is None else other
    return builder.shuffle_vector(one, second, ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes)))
