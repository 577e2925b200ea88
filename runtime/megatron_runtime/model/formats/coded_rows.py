"""Rows of quantized matrices as integers with scales, decoded from the blocks of ggml's types.

The layouts are those of ggml's ``ggml-common.h`` and of the gguf package's ``quants.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

BLOCK = 32
"""Columns of a block. Ranks may divide the columns of a matrix between blocks."""

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
Words = NDArray[np.uint32]

QUAD = 4
"""Columns whose codes are in one word."""
_LOW, _HIGH = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
_MASKS = {4: _LOW, 2: np.uint32(0x33333333), 1: np.uint32(0x55555555)}
"""Of the lower ones of adjacent groups of so many bits."""


@dataclass(frozen=True)
class Coding:
    """A weight is ``scale * (code - offset) + min``, with one scale for ``group`` columns and one min for a block."""

    bits: int
    group: int = BLOCK
    offset: int = 0
    has_mins: bool = False

    def num_bytes(self, elements: int) -> int:
        """Bytes of as many weights, of whole blocks: of their codes, scales and mins."""
        return elements * self.bits // 8 + 2 * elements // self.group + 2 * elements // BLOCK * self.has_mins


@dataclass(frozen=True)
class CodedRows:
    """Rows of a matrix. Scales and mins of the K types are rounded to float16; those of other types are float16."""

    codes: Words
    """uint32 [rows, blocks, bits], see `packed`."""
    scales: Halves
    """[rows, columns / group]."""
    mins: Halves | None
    """[rows, columns / BLOCK], if the coding has mins."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.codes)

    @property
    def elements(self) -> int:
        """Number of weights."""
        return len(self) * int(self.codes.shape[1]) * BLOCK

    def rearranged(self, places: Sequence[int], columns: slice) -> CodedRows:
        """Some columns of these rows after equal groups of columns are put in the order of ``places``.

        Groups and ``columns`` are whole blocks.
        """
        total = int(self.codes.shape[1]) * BLOCK

        def part(values: NDArray[Any]) -> NDArray[Any]:
            moved = values.reshape(len(self), len(places), -1)[:, list(places)].reshape(values.shape)
            per = total // int(values.shape[1])
            return moved[:, columns.start // per : columns.stop // per]

        return CodedRows(part(self.codes), part(self.scales), None if self.mins is None else part(self.mins))


CODINGS: dict[str, Coding] = {
    "Q4_0": Coding(4, offset=8),
    "Q4_1": Coding(4, has_mins=True),
    "Q5_0": Coding(5, offset=16),
    "Q5_1": Coding(5, has_mins=True),
    "Q8_0": Coding(8, offset=128),
    "Q4_K": Coding(4, has_mins=True),
    "Q5_K": Coding(5, has_mins=True),
    "Q6_K": Coding(6, group=16, offset=32),
}
"""By the names of ggml's types. Matrices of other types can't stay quantized."""


def packed(codes: Bytes, bits: int) -> Words:
    """The layout of codes in memory, from one code in each byte: [rows, columns] to [rows, blocks, bits].

    Of codes of 8 bits, each word has those of four consecutive columns. Of shorter ones, the low four bits are in four
    words: those of a block's first 16 columns in the low halves of the bytes, and those of the others in the high
    halves, as ggml stores them. Then follow the other bits: each byte has those of the same column of several quads.
    """
    quads = np.ascontiguousarray(codes).view(np.uint32).reshape(len(codes), -1, BLOCK // QUAD)
    if bits == 8:
        return quads
    low = quads & _LOW
    words = [low[..., :4] | low[..., 4:] << 4]
    if count := bits - 4:
        high = (quads >> 4).reshape(*quads.shape[:2], -1, 8 // count)
        shifts = np.arange(0, 8, count, dtype=np.uint32)
        words.append(np.bitwise_or.reduce((high & ((1 << count) - 1) * 0x01010101) << shifts, axis=-1))
    return np.concatenate(words, axis=-1)


def decode(raw: Bytes, kind: GGMLQuantizationType, columns: slice) -> CodedRows:
    """Decode some columns of stored rows, uint8 [rows, stored bytes of a row]; the columns are whole blocks."""
    elements, size = GGML_QUANT_SIZES[kind]
    first, last = columns.start // elements, -(-columns.stop // elements)
    blocks = raw.reshape(len(raw), -1, size)[:, first:last].reshape(-1, size)
    words, scales, mins = _DECODERS[str(kind.name)](blocks)
    coding = CODINGS[str(kind.name)]
    start, stop = columns.start - first * elements, columns.stop - first * elements

    def part(values: NDArray[Any], per: int, count: int = 1) -> NDArray[Any]:
        return values.reshape(len(raw), -1)[:, start // per * count : stop // per * count]

    codes = part(words, BLOCK, coding.bits).reshape(len(raw), -1, coding.bits)
    return CodedRows(codes, part(scales, coding.group), None if mins is None else part(mins, BLOCK))


_Decoded = tuple[Words, Halves, Halves | None]
"""Of stored blocks [n, stored bytes]: the words of `packed` for each block of 32 columns, the scales and the mins, [n,
any]."""


def _halves(blocks: Bytes, start: int) -> Halves:
    """The number of float16 at a byte of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _words(blocks: Bytes, start: int, stop: int) -> Words:
    """Some bytes of each block, [n, words]."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(np.uint32)


def _q4_0(blocks: Bytes) -> _Decoded:
    return _words(blocks, 2, 18), _halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> _Decoded:
    return _words(blocks, 4, 20), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> _Decoded:
    return _with_fifth_bits(_words(blocks, 6, 22), _words(blocks, 2, 6)), _halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Decoded:
    return _with_fifth_bits(_words(blocks, 8, 24), _words(blocks, 4, 8)), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> _Decoded:
    return _words(blocks, 2, 34) ^ np.uint32(0x80808080), _halves(blocks, 0), None


def _q4_k(blocks: Bytes) -> _Decoded:
    return _of_pairs(_words(blocks, 16, 144), 1), *_scales_and_mins(blocks)


def _q5_k(blocks: Bytes) -> _Decoded:
    high = _transposed(_words(blocks, 16, 48), 1)
    words = np.concatenate((_of_pairs(_words(blocks, 48, 176), 1), high[..., None]), axis=2)
    return words, *_scales_and_mins(blocks)


def _q6_k(blocks: Bytes) -> _Decoded:
    # In each half of the columns, the words with the first two bits of a quad of each block: [n * 4, 4].
    high = _transposed(_words(blocks, 128, 192).reshape(-1, 4), 2).reshape(-1, 2, 2, 4).transpose(0, 1, 3, 2)
    words = np.concatenate((_of_pairs(_words(blocks, 0, 128), 2), high.reshape(len(blocks), -1, 2)), axis=2)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208).astype(np.float32)
    return words, scales.astype(np.float16), None


def _with_fifth_bits(low: Words, bits: Words) -> Words:
    """Words of four bits of each code [n, 4] and the fifth bits in the order of columns [n, 1], to [n, 5]."""
    # The number of a column has five bits; its lower two become the upper ones.
    for upper, lower in ((4, 1), (3, 0), (2, 1), (1, 0)):
        bits = _with_swapped_places(bits, upper, lower)
    return np.concatenate((low, bits), axis=1)


def _with_swapped_places(words: Words, upper: int, lower: int) -> Words:
    """Each bit moves to the place whose number has these two bits swapped."""
    shift = np.uint32((1 << upper) - (1 << lower))
    mask = np.uint32(sum(1 << place for place in range(32) if not place >> upper & 1 and place >> lower & 1))
    swapped: Words = ((words >> shift) ^ words) & mask
    moved: Words = words ^ swapped ^ (swapped << shift)
    return moved


def _of_pairs(stored: Words, apart: int) -> Words:
    """[n, 32] to [n, 8, 4]: eight words have two blocks, in the low and high halves of their bytes.

    The high halves are those of the block that is ``apart`` blocks later.
    """
    # As numbers of 16 bytes: operations on four words at a time would take most of the time for their overhead.
    halves = stored.view(np.complex128).reshape(-1, 2)
    first, last = (np.ascontiguousarray(halves[:, half]).view(np.uint32) for half in (0, 1))
    blocks = np.empty((len(stored), 4 // apart, 2, apart), np.complex128)
    for half, words in enumerate((first & _LOW | (last & _LOW) << 4, first >> 4 & _LOW | last & _HIGH)):
        blocks[:, :, half] = words.view(np.complex128).reshape(-1, 4 // apart, apart)
    return blocks.view(np.uint32).reshape(-1, 8, 4)


def _transposed(stored: Words, bits: int) -> Words:
    """[n, 8 / bits], whose bytes have as many fields: field j of word i becomes field i of word j.

    It swaps halves of ever smaller squares, as Warren does for a matrix of bits (Hacker's Delight, 2012, 7-3).
    """
    words, side = stored.T.copy(), 4 // bits
    while side:
        upper, lower = words.reshape(-1, 2, side, len(stored)).transpose(1, 0, 2, 3)
        mask = _MASKS[side * bits]
        swapped = ((upper >> (side * bits)) ^ lower) & mask
        lower ^= swapped
        upper ^= swapped << (side * bits)
        side //= 2
    return words.T


def _scales_and_mins(blocks: Bytes) -> tuple[Halves, Halves]:
    """Those of eight blocks, six bits each in twelve bytes, times the two factors of all."""
    low, middle, high = blocks[:, 4:16].T.copy().reshape(3, 4, -1)
    scales = np.concatenate((low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)))
    mins = np.concatenate((middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)))
    factors = (_halves(blocks, start).astype(np.float32)[:, 0] for start in (0, 2))
    scales, mins = (factor * numbers for factor, numbers in zip(factors, (scales, mins), strict=True))
    return scales.T.astype(np.float16), -mins.T.astype(np.float16)


_DECODERS: dict[str, Callable[[Bytes], _Decoded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
