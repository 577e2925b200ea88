"""Copies the blocks of ggml's types into the panels of a quantized matrix.

The layouts of the blocks are those of ggml's ``ggml-common.h``; `panel_products` reads the panels. There, the bytes of
a word have the codes of four consecutive columns. Of codes of fewer than 8 bits, the low four are in four words: those
of a block's first 16 columns in the low halves of the bytes, and those of the others in the high halves, as ggml stores
most types. Then follow the other bits: each byte has those of the same column of several quads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llvmlite import ir
from numba import int64, njit, types, void
from numba.extending import intrinsic
from torch import Tensor

from megatron_runtime.model.formats.coded_rows import BLOCK, CODINGS, QUAD, CodedRows
from megatron_runtime.model.kernels.compiled import address, array_at, compile_kernel
from megatron_runtime.model.kernels.kernel_compiler import kernel_factory
from megatron_runtime.model.kernels.panel_products import PANEL, PARTS, Packing
from megatron_runtime.model.kernels.recording import Kernel
from megatron_runtime.model.kernels.vector_instructions import LANES, load

_LOW, _HIGH = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
_ONE_OF_EACH, _TWO_OF_EACH = np.uint32(0x01010101), np.uint32(0x03030303)
"""The lowest bits of each byte."""
_SIGNS = np.uint32(0x80808080)
_SPREAD = np.uint32(0x00204081)
"""Times four bits, it has one of them in the lowest bit of each byte."""
_NUMBERS = 16
"""The most scales of a block of a K type."""
_STORED_CODES = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "Q8_0": 2, "Q4_K": 16, "Q5_K": 48, "Q6_K": 0}
"""The byte of a block at which the codes begin, or their low four bits."""
_FIFTH_BITS = {"Q5_0": 2, "Q5_1": 4, "Q5_K": 16}
"""The byte of a block at which the fifth bits begin."""


def store(given: CodedRows, start: int, codes: Tensor, scales: Tensor, mins: Tensor) -> None:
    """Copy rows into the panels of a matrix, from its row ``start`` on.

    Args:
        given: Their columns are those of the matrix.
        start: A row of the matrix.
        codes: uint8 [panels, blocks, PARTS, vectors, LANES, QUAD].
        scales: float16 [panels, blocks, groups, PANEL]. Those of the K types are rounded.
        mins: float16 [panels, blocks, PANEL], where the coding has mins; likewise.
    """
    places = (address(part) for part in (codes, scales, mins))
    order = (given.rows.ctypes.data, len(given.rows), given.blocks.ctypes.data, len(given.blocks))
    # The kernel gets addresses alone, and would write elsewhere.
    assert given.stored.flags.c_contiguous
    assert codes.shape[1] == len(given.blocks)
    assert start + len(given.rows) <= codes.shape[0] * PANEL
    _store_kernel(given.kind)(given.stored.ctypes.data, given.stored.shape[1], *order, start, *places)


def prepare(kind: str) -> None:
    """Compile the kernel for the blocks of a type now."""
    _store_kernel(kind)


@kernel_factory
def _store_kernel(kind: str) -> Kernel:
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    packing, inner = Packing.of(CODINGS[kind]), elements // BLOCK
    vectors, groups = packing.vectors, packing.groups
    low, fifth = _STORED_CODES[kind], _FIFTH_BITS.get(kind, -1)
    is_k, has_mins = kind.endswith("_K"), packing.has_mins

    def store_blocks(
        given: Any, row_bytes: Any, rows: Any, height: Any, blocks: Any, width: Any, start: Any, codes: Any,
        scales: Any, mins: Any,
    ) -> None:  # fmt: skip
        row_at, block_at = array_at(rows, height, np.int64), array_at(blocks, width, np.int64)
        panels = (start + height + PANEL - 1) // PANEL
        words = array_at(codes, (panels, width, PARTS, vectors, LANES), np.uint32)
        factors = array_at(scales, (panels, width, groups, PANEL), np.uint16)
        added = array_at(mins, (panels, width, PANEL), np.uint16)
        numbers = np.empty((LANES, 2, _NUMBERS), np.uint16)
        row = 0
        while row < height:
            panel, first = (start + row) // PANEL, (start + row) % PANEL
            together = min(LANES - first % LANES, height - row)
            numbered = -1
            for block in range(width):
                stored, place = block_at[block] // inner, block_at[block] % inner
                to, scale_to, min_to = words[panel, block, first // LANES], factors[panel, block], added[panel, block]
                for near in range(together):
                    source = given + row_at[row + near] * row_bytes + stored * size
                    lane = first + near
                    _store_codes(vectors, low, fifth, is_k, source, place, to, lane % LANES)
                    if is_k and stored != numbered:
                        _number_k(groups, source, numbers[near])
                    for group in range(groups):
                        scale_to[group, lane] = numbers[near, 0, place * groups + group] if is_k else _short(source)
                    if has_mins:
                        min_to[lane] = numbers[near, 1, place] if is_k else _short(source + 2)
                numbered = stored
            row += together

    return compile_kernel(store_blocks, void(*[int64] * 10), parallel=False, fast=False)


@njit(inline="always")
def _store_codes(
    vectors: Any, low: Any, fifth: Any, is_k: Any, source: Any, place: Any, to: Any, lane: Any
) -> None:  # fmt: skip
    """The codes of 32 columns, which are those at a ``place`` in a block of a K type."""
    if vectors == 8:
        for word in range(8):
            to[word, lane] = _word(source + low, word) ^ _SIGNS
    elif vectors == 6:
        _store_half_of_pair(source + low + place // 4 * 64 + place % 2 * 32, place % 4 // 2, to, lane)
        _store_upper_two(source + 128 + place // 4 * 32, place % 4, to, lane)
    elif is_k:
        _store_half_of_pair(source + low + place // 2 * 32, place % 2, to, lane)
    else:
        for word in range(4):
            to[word, lane] = _word(source + low, word)
    if fifth >= 0:
        _store_fifth(is_k, source + fifth, place, to, lane)


@njit(inline="always")
def _store_half_of_pair(pair: Any, is_high: Any, to: Any, lane: Any) -> None:
    """The K types store two blocks in 32 bytes, in the low and in the high halves of each."""
    for word in range(4):
        first, last = _word(pair, word), _word(pair, word + 4)
        if is_high:
            to[word, lane] = ((first >> np.uint32(4)) & _LOW) | (last & _HIGH)
        else:
            to[word, lane] = (first & _LOW) | ((last & _LOW) << np.uint32(4))


@njit(inline="always")
def _store_upper_two(pairs: Any, place: Any, to: Any, lane: Any) -> None:
    """Each byte has two bits of the same column of four blocks."""
    for word in range(2):
        bits = np.uint32(0)
        for quad in range(4):
            of_block = (_word(pairs, word * 4 + quad) >> np.uint32(place * 2)) & _TWO_OF_EACH
            bits |= of_block << np.uint32(quad * 2)
        to[4 + word, lane] = bits


@njit(inline="always")
def _store_fifth(is_k: Any, stored: Any, place: Any, to: Any, lane: Any) -> None:
    """Each byte has a bit of the same column of the eight blocks of a K type; else each block has 32 bits in a word."""
    bits = np.uint32(0)
    for quad in range(BLOCK // QUAD):
        if is_k:
            of_block = (_word(stored, quad) >> np.uint32(place)) & _ONE_OF_EACH
        else:
            of_block = (((_word(stored, 0) >> np.uint32(quad * QUAD)) & np.uint32(0xF)) * _SPREAD) & _ONE_OF_EACH
        bits |= of_block << np.uint32(quad)
    to[4, lane] = bits


@njit(inline="always")
def _number_k(groups: Any, source: Any, numbers: Any) -> None:
    """The scales, and the mins, of a block of 256 columns of a K type: their integers times the factors of all."""
    if groups == 2:
        factor, integers = _from_half(source + 208), array_at(source + 192, _NUMBERS, np.int8)
        for group in range(_NUMBERS):
            numbers[0, group] = _half_bits(np.float32(integers[group]) * factor)
        return
    factor, least = _from_half(source), -_from_half(source + 2)
    # The integers have six bits. The upper two of those of the last four blocks are in the bytes of the first four.
    stored = array_at(source + 4, 12, np.uint8)
    for place in range(4):
        scale, lowest, later = stored[place], stored[place + 4], stored[place + 8]
        numbers[0, place] = _half_bits(np.float32(scale & 0x3F) * factor)
        numbers[1, place] = _half_bits(np.float32(lowest & 0x3F) * least)
        numbers[0, place + 4] = _half_bits(np.float32(later & 0x0F | scale >> 6 << 4) * factor)
        numbers[1, place + 4] = _half_bits(np.float32(later >> 4 | lowest >> 6 << 4) * least)


@njit(inline="always")
def _word(place: Any, index: Any) -> Any:
    return array_at(place + index * 4, 1, np.uint32)[0]


@njit(inline="always")
def _short(place: Any) -> Any:
    return array_at(place, 1, np.uint16)[0]


def _from_half_by_type(_: Any, place: Any) -> Any:
    """The float16 at an address, as float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(load(builder, arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(place), generate


def _half_bits_by_type(_: Any, value: Any) -> Any:
    """The bits of a float32 that is rounded to float16, to nearest, half to even."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(value), generate


# Called without the typing context, unlike the signatures above.
_from_half: Any = intrinsic(_from_half_by_type)
_half_bits: Any = intrinsic(_half_bits_by_type)
