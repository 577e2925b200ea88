"""The prefetch instruction of the processor, which numba does not offer."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_LINE_BYTES = 64
_READ, _KEEP, _DATA = 0, 3, 1


def _prefetch_line_by_type(_: Any, address: Any) -> Any:
    """LLVM's prefetch of the cache line at an address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte_pointer], ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
        )
        pointer = builder.inttoptr(arguments[0], byte_pointer)
        builder.call(function, [pointer, *(number(kind) for kind in (_READ, _KEEP, _DATA))])
        return context.get_dummy_value()

    return types.void(address), generate


# Called with the address alone, unlike the signature above.
_prefetch_line: Any = intrinsic(_prefetch_line_by_type)


@njit(inline="always")
def prefetch(array: Any) -> None:
    """Prefetch a contiguous array into the first-level cache; only for compiled code."""
    for start in range(0, array.size * array.itemsize, _LINE_BYTES):
        _prefetch_line(array.ctypes.data + start)
