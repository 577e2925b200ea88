"""Rows of quantized matrices as integers with scales, decoded from the blocks of ggml's types.

The layouts are those of ggml's ``ggml-common.h`` and of the gguf package's ``quants.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

BLOCK = 32
"""Columns of a block. Ranks may divide the columns of a matrix between blocks."""

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]


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

    codes: Bytes
    """uint8 [rows, columns], one code each."""
    scales: Halves
    """[rows, columns / group]."""
    mins: Halves | None
    """[rows, columns / BLOCK], if the coding has mins."""


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


def decode(raw: Bytes, kind: GGMLQuantizationType, columns: slice) -> CodedRows:
    """Decode some columns of stored rows, uint8 [rows, stored bytes of a row]; the columns are whole blocks."""
    elements, size = GGML_QUANT_SIZES[kind]
    first, last = columns.start // elements, -(-columns.stop // elements)
    blocks = raw.reshape(len(raw), -1, size)[:, first:last].reshape(-1, size)
    codes, scales, mins = _DECODERS[str(kind.name)](blocks)
    within = slice(columns.start - first * elements, columns.stop - first * elements)
    group = CODINGS[str(kind.name)].group

    def part(values: NDArray[np.generic], per: int) -> NDArray[np.generic]:
        return values.reshape(len(raw), -1)[:, within.start // per : within.stop // per]

    return CodedRows(part(codes, 1), part(scales, group), None if mins is None else part(mins, BLOCK))  # type: ignore[arg-type]


_Decoded = tuple[Bytes, Halves, Halves | None]
"""Of blocks [n, stored bytes]: the codes, and the scales and mins, [n, any]."""


def _halves(blocks: Bytes, start: int) -> Halves:
    """The number of float16 at a byte of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """The low half of each byte of [..., bytes], then the high halves: [..., 2 bytes]."""
    return np.concatenate((packed & np.uint8(0x0F), packed >> np.uint8(4)), axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Each bit of [n, 4] as 0 or 16: [n, 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> _Decoded:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> _Decoded:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> _Decoded:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Decoded:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> _Decoded:
    return blocks[:, 2:] ^ np.uint8(0x80), _halves(blocks, 0), None


def _q4_k(blocks: Bytes) -> _Decoded:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, BLOCK)), *_scales_and_mins(blocks)


def _q5_k(blocks: Bytes) -> _Decoded:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = ((blocks[:, None, 16:48] >> shifts) & np.uint8(1)).reshape(-1, 4, 2 * BLOCK)
    return _nibbles(blocks[:, 48:].reshape(-1, 4, BLOCK)) | (high << np.uint8(4)), *_scales_and_mins(blocks)


def _q6_k(blocks: Bytes) -> _Decoded:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, BLOCK)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, BLOCK) >> shifts) & np.uint8(3)).reshape(-1, 8, BLOCK)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208).astype(np.float32)
    return low | (high << np.uint8(4)), scales.astype(np.float16), None


def _scales_and_mins(blocks: Bytes) -> tuple[Halves, Halves]:
    """Those of eight blocks, six bits each in twelve bytes, times the two factors of all."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)), axis=1)
    mins = np.concatenate((middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)), axis=1)
    factors = (_halves(blocks, 0).astype(np.float32), _halves(blocks, 2).astype(np.float32))
    return (factors[0] * scales).astype(np.float16), (-factors[1] * mins).astype(np.float16)


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
