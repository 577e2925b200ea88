"""Products of matrices in bfloat16 by the tiles of Intel AMX, generated as LLVM instructions.

A tile has 16 rows of 64 bytes. One instruction adds, to each of 16 x 16 sums in float32, the products of 32 channels,
two after the other. So a sum has one order, that of its channels, whatever other rows and columns there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from megatron_runtime.model.kernels.vector_instructions import call_intrinsic

TILE = 16
"""Rows of a tile, and its columns of 32 bits."""
STEP = 2 * TILE
"""Channels in bfloat16 that one instruction adds."""
BLOCK = 2 * TILE
"""Rows and columns of the products of `multiply_tiles`, which are four tiles."""
STEP_BYTES = STEP * 2
"""Of a row of a tile."""
TILE_BYTES = TILE * STEP_BYTES
CONFIGURATION_BYTES = 64

_BYTE = ir.IntType(8)
_SUMS, _ROWS, _COLUMNS = ((0, 1), (2, 3)), (4, 5), (6, 7)
"""Numbers of the tiles: of the sums by rows and columns, of the inputs, and of the matrix."""


def configuration() -> NDArray[np.uint8]:
    """For `begin_tiles`: all eight tiles have 16 rows of 64 bytes (palette 1 of the instruction LDTILECFG)."""
    made = np.zeros(CONFIGURATION_BYTES, np.uint8)
    made[0] = 1
    made[16:32].view(np.uint16)[:] = STEP_BYTES
    made[48:56] = TILE
    return made


def _begin_by_type(_: Any, address: Any) -> Any:
    """Use the tiles in this thread until `end_tiles`; ``address`` is that of `configuration`."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _run(builder, "ldtilecfg", _pointer(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(address), generate


def _end_by_type(_: Any) -> Any:
    """Free the tiles, so that the kernel need not save them when it switches threads."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        _run(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _multiply_by_type(_: Any, tiles: Any, steps: Any, inputs: Any, row_bytes: Any, matrix: Any, products: Any) -> Any:
    """Products of one or two tiles of rows with the two tiles of columns of a panel.

    ``tiles``, the number of those of rows, is a literal; ``steps`` is the number of channels, divided by STEP. The
    inputs are bfloat16 at an address, with ``row_bytes`` from a row to the next one. The others are addresses: of the
    panel, bfloat16 [steps, 2, TILE, TILE, 2], whose last three dimensions are pairs of channels, columns, and the
    channels of a pair; and of the products, float32 [TILE * tiles, BLOCK].
    """
    count = tiles.literal_value

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, steps, inputs, row_bytes, matrix, products = arguments
        number = steps.type
        for number_of_tile in (tile for line in _SUMS[:count] for tile in line):
            _run(builder, "tilezero", _BYTE(number_of_tile))
        with cgutils.for_range(builder, steps) as loop:
            for row in range(count):
                line = builder.add(inputs, builder.mul(row_bytes, number(row * TILE)))
                place = builder.add(line, builder.mul(loop.index, number(STEP_BYTES)))
                _run(builder, "tileloadd64", _BYTE(_ROWS[row]), _pointer(builder, place), row_bytes)
            for column in range(2):
                index = builder.add(builder.mul(loop.index, number(2)), number(column))
                place = builder.add(matrix, builder.mul(index, number(TILE_BYTES)))
                _run(builder, "tileloadd64", _BYTE(_COLUMNS[column]), _pointer(builder, place), number(STEP_BYTES))
            for row in range(count):
                for column in range(2):
                    chosen = (_SUMS[row][column], _ROWS[row], _COLUMNS[column])
                    _run(builder, "tdpbf16ps", *map(_BYTE, chosen))
        for row in range(count):
            for column in range(2):
                place = builder.add(products, number(4 * TILE * (row * BLOCK + column)))
                _run(builder, "tilestored64", _BYTE(_SUMS[row][column]), _pointer(builder, place), number(4 * BLOCK))
        return context.get_dummy_value()

    return types.void(tiles, steps, inputs, row_bytes, matrix, products), generate


# Called without the typing context, unlike the signatures above.
begin_tiles: Any = intrinsic(_begin_by_type)
end_tiles: Any = intrinsic(_end_by_type)
multiply_tiles: Any = intrinsic(prefer_literal=True)(_multiply_by_type)


def _run(builder: Any, instruction: str, *arguments: Any) -> None:
    call_intrinsic(builder, f"x86.{instruction}", ir.VoidType(), *arguments)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTE.as_pointer())
