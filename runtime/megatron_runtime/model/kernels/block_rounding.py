"""Rounding of blocks of numbers to int8, as LLVM instructions on vectors.

Loops of so few numbers are unrolled before LLVM would turn them into such instructions.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
"""Numbers of a vector."""

_BYTE, _SHORT, _INT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT, LANES), ir.VectorType(_FLOAT, LANES)
_NEAREST = 12582912.0
"""1.5 * 2^23: added to a float32 below 2^22, it rounds that to the nearest integer, half to even."""
_NEAREST_BITS = 0x4B400000
"""Its bits; those of the sum are larger by the integer."""


def _largest_by_type(_: Any, array: Any, address: Any) -> Any:
    """The bits of the largest magnitude of sixteen numbers at an address, whose type is that of ``array``.

    Compared as integers, which is exact, and finds a NaN larger than all numbers.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(_numbers(builder, array, arguments[1]), _INTS)
        return _reduced(builder, "umax", builder.and_(bits, _all(_INTS, 0x7FFFFFFF)))

    return types.uint32(array, address), generate


def _round_by_type(_: Any, array: Any, address: Any, factor: Any, to: Any) -> Any:
    """Write sixteen numbers times ``factor``, rounded to int8, to the address ``to``; returns their sum."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        numbers = _numbers(builder, array, arguments[1])
        undefined = ir.Constant(_FLOATS, ir.Undefined)
        factors = builder.insert_element(undefined, arguments[2], _INT(0))
        factors = builder.shuffle_vector(factors, undefined, _all(_INTS, 0))
        shifted = builder.fadd(builder.fmul(numbers, factors), _all(_FLOATS, _NEAREST))
        rounded = builder.sub(builder.bitcast(shifted, _INTS), _all(_INTS, _NEAREST_BITS))
        codes = ir.VectorType(_BYTE, LANES)
        builder.store(builder.trunc(rounded, codes), builder.inttoptr(arguments[3], codes.as_pointer()), align=1)
        return _reduced(builder, "add", rounded)

    return types.int32(array, address, factor, to), generate


# Called without the typing context, unlike the signatures above.
largest_bits: Any = intrinsic(_largest_by_type)
round_to_bytes: Any = intrinsic(_round_by_type)


def _numbers(builder: Any, array: Any, address: Any) -> Any:
    """Sixteen numbers of float32, or of bfloat16 as the integers of their bits."""
    if not isinstance(array.dtype, types.Integer):
        return builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=1)
    stored = builder.load(builder.inttoptr(address, ir.VectorType(_SHORT, LANES).as_pointer()), align=1)
    return builder.bitcast(builder.shl(builder.zext(stored, _INTS), _all(_INTS, 16)), _FLOATS)


def _reduced(builder: Any, operation: str, numbers: Any) -> Any:
    function = builder.module.declare_intrinsic(
        f"llvm.vector.reduce.{operation}.v{LANES}i32", fnty=ir.FunctionType(_INT, [_INTS])
    )
    return builder.call(function, [numbers])


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * LANES)
