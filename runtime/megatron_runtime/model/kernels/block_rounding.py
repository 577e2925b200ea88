"""Rounding of blocks of numbers to int8, as LLVM instructions on vectors.

Loops of so few numbers are unrolled before LLVM would turn them into such instructions.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from megatron_runtime.model.kernels.vector_instructions import (
    LANES,
    call_intrinsic,
    constant,
    floats,
    load_numbers,
    spread,
)

_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_INTS, _FLOATS = ir.VectorType(_INT, LANES), floats(LANES)
_NEAREST = 12582912.0
"""1.5 * 2^23: added to a float32 below 2^22, it rounds that to the nearest integer, half to even."""
_NEAREST_BITS = 0x4B400000
"""Its bits; those of the sum are larger by the integer."""


def _largest_by_type(_: Any, array: Any, address: Any) -> Any:
    """The bits of the largest magnitude of sixteen numbers at an address, whose type is that of ``array``.

    Compared as integers, which is exact, and finds a NaN larger than all numbers.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(load_numbers(builder, array, arguments[1]), _INTS)
        return _reduced(builder, "umax", builder.and_(bits, constant(_INTS, 0x7FFFFFFF)))

    return types.uint32(array, address), generate


def _round_by_type(_: Any, array: Any, address: Any, factor: Any, to: Any) -> Any:
    """Write sixteen numbers times ``factor``, rounded to int8, to the address ``to``; returns their sum."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        numbers = load_numbers(builder, array, arguments[1])
        shifted = builder.fadd(builder.fmul(numbers, spread(builder, arguments[2])), constant(_FLOATS, _NEAREST))
        rounded = builder.sub(builder.bitcast(shifted, _INTS), constant(_INTS, _NEAREST_BITS))
        codes = ir.VectorType(_BYTE, LANES)
        builder.store(builder.trunc(rounded, codes), builder.inttoptr(arguments[3], codes.as_pointer()), align=1)
        return _reduced(builder, "add", rounded)

    return types.int32(array, address, factor, to), generate


# Called without the typing context, unlike the signatures above.
largest_bits: Any = intrinsic(_largest_by_type)
round_to_bytes: Any = intrinsic(_round_by_type)


def _reduced(builder: Any, operation: str, numbers: Any) -> Any:
    return call_intrinsic(builder, f"vector.reduce.{operation}.v{LANES}i32", _INT, numbers)
