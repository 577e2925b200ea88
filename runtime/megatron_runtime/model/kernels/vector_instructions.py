"""LLVM instructions on vectors, for code that generates the innermost loop of a kernel."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

LANES = 16
"""Numbers of 32 bits in a vector of 512 bits."""

_SHORT, _INT, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


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


def fused(builder: Any, factor: Any, other: Any, added: Any) -> Any:
    """``factor * other + added``: one instruction where the processor has it, and one rounding everywhere."""
    kind = factor.type
    function = builder.module.declare_intrinsic(
        f"llvm.fma.v{kind.count}f32", fnty=ir.FunctionType(kind, [kind, kind, kind])
    )
    return builder.call(function, [factor, other, added])


def lane_sum(builder: Any, vector: Any) -> Any:
    """The sum of the lanes, of which there are a power of two, in the order of a binary tree."""
    lanes, undefined = vector.type.count, ir.Constant(vector.type, ir.Undefined)
    if lanes == 1:
        return builder.extract_element(vector, _INT(0))
    half = lanes // 2
    chosen = ir.VectorType(_INT, half)
    low, high = (
        builder.shuffle_vector(vector, undefined, ir.Constant(chosen, list(range(start, start + half))))
        for start in (0, half)
    )
    return lane_sum(builder, builder.fadd(low, high))
