"""LLVM instructions that add products of codes and inputs, both bytes, as integers of 32 bits.

All classes give the same integers. Their arguments are vectors of words of 32 bits: a word of codes has four unsigned
bytes, and a word of inputs four signed ones from -127 to 127.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from megatron_runtime.model.kernels.vector_instructions import LANES, call_intrinsic, constant, has_feature

_LARGEST_INPUT = 127
_LARGEST_SHORT = 2**15 - 1
_PAIR_INSTRUCTIONS = {
    LANES: ("x86.avx512.pmaddubs.w.512", "x86.avx512.pmaddw.d.512"),
    LANES // 2: ("x86.avx2.pmadd.ub.sw", "x86.avx2.pmadd.wd"),
}
"""VPMADDUBSW and VPMADDWD by the lanes of their vectors."""

Sums = Callable[[Any, Any], "DotSums | PairSums | ProductSums"]
"""Makes the sums of a group of columns, with the builder and the integers that they begin with."""


def sums_of(context: Any, bits: int) -> tuple[Sums, int]:
    """The fastest instructions of the processor for codes of so many bits, and the lanes of their vectors."""
    if has_feature(context, "avx512vnni"):
        return DotSums, LANES
    if has_feature(context, "avx512bw"):
        return partial(PairSums, bits), LANES
    if has_feature(context, "avx2"):
        return partial(PairSums, bits), LANES // 2
    return ProductSums, LANES


class _Sums:
    """Sums of a group of columns, one in each lane."""

    def __init__(self, builder: Any, start: Any) -> None:
        self._builder, self._total = builder, start

    def total(self) -> Any:
        """The sums."""
        return self._total


class DotSums(_Sums):
    """By VPDPBUSD, which adds the products of four bytes at once (AVX512-VNNI)."""

    def add(self, codes: Any, inputs: Any) -> None:
        """Add the products of the bytes of each lane."""
        kind = self._total.type
        self._total = call_intrinsic(self._builder, "x86.avx512.vpdpbusd.512", kind, self._total, codes, inputs)


class PairSums(_Sums):
    """By VPMADDUBSW, which adds the products of pairs of bytes in 16 bits, and VPMADDWD (AVX2, AVX512-BW).

    Codes of 6 bits and less: as many sums of pairs as always fit are added in 16 bits, before their halves are added in
    32. Codes of 8 bits, of which a pair may not fit, are widened to 16 bits first.
    """

    def __init__(self, bits: int, builder: Any, start: Any) -> None:
        super().__init__(builder, start)
        self._most = _LARGEST_SHORT // (2 * ((1 << bits) - 1) * _LARGEST_INPUT)
        self._pairs: Any = None
        self._count = 0
        lanes = start.type.count
        self._bytes, self._shorts = ir.VectorType(ir.IntType(8), 4 * lanes), ir.VectorType(ir.IntType(16), 2 * lanes)
        self._multiply_bytes, self._multiply_shorts = _PAIR_INSTRUCTIONS[lanes]

    def add(self, codes: Any, inputs: Any) -> None:
        """Add the products of the bytes of each lane."""
        builder = self._builder
        if not self._most:
            for one, other in zip(self._widened(codes, builder.lshr), self._widened(inputs, builder.ashr), strict=True):
                self._add_halves(one, other)
            return
        given = [builder.bitcast(words, self._bytes) for words in (codes, inputs)]
        pairs = call_intrinsic(builder, self._multiply_bytes, self._shorts, *given)
        self._pairs = builder.add(self._pairs, pairs) if self._count else pairs
        self._count += 1
        if self._count == self._most:
            self._add_pairs()

    def total(self) -> Any:
        """The sums."""
        if self._count:
            self._add_pairs()
        return self._total

    def _add_pairs(self) -> None:
        self._add_halves(self._pairs, constant(self._shorts, 1))
        self._count = 0

    def _add_halves(self, one: Any, other: Any) -> None:
        """Add the products of the two halves of each lane, in 16 bits."""
        products = call_intrinsic(self._builder, self._multiply_shorts, self._total.type, one, other)
        self._total = self._builder.add(self._total, products)

    def _widened(self, words: Any, shift_right: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
        """The even bytes of vectors in 16 bits, and the odd ones."""
        eight, shorts = constant(self._shorts, 8), self._builder.bitcast(words, self._shorts)
        return shift_right(self._builder.shl(shorts, eight), eight), shift_right(shorts, eight)


class ProductSums(_Sums):
    """By products in 16 bits, on any processor. A product of an unsigned byte and a signed one always fits."""

    def add(self, codes: Any, inputs: Any) -> None:
        """Add the products of the bytes of each lane."""
        builder, words = self._builder, self._total.type
        shorts = ir.VectorType(ir.IntType(16), 2 * words.count)
        eight, sixteen = constant(shorts, 8), constant(words, 16)
        unsigned, signed = builder.bitcast(codes, shorts), builder.bitcast(inputs, shorts)
        even = builder.mul(
            builder.lshr(builder.shl(unsigned, eight), eight), builder.ashr(builder.shl(signed, eight), eight)
        )
        odd = builder.mul(builder.lshr(unsigned, eight), builder.ashr(signed, eight))
        for products in (even, odd):
            pairs = builder.bitcast(products, words)
            for half in (builder.shl(pairs, sixteen), pairs):
                self._total = builder.add(self._total, builder.ashr(half, sixteen))
