"""Matrices of integers in the formats of compressed-tensors: ``pack-quantized`` and ``int-quantized``.

Sources: ``pack_to_int32`` and ``dequantize`` of the compressed-tensors package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_runtime.model.formats.quantization.kept_codes import coding_of
from megatron_runtime.model.formats.quantization.stored_matrix import (
    QuantizedPart,
    ScaleGrid,
    Shape,
    StoredModule,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_runtime.model.formats.coded_rows import Coding

WORD = 32
"""Bits of the words that codes are packed in."""
_ZERO_TYPES = ("I8", "BF16", "F16", "F32")
"""Of zero points that are not packed."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """The codes in int32 words [..., n], the first one in the lowest bits: uint8 [..., 32 n / bits]."""
    import torch  # Imported here, because reading the header does not need it.

    # Not contiguous(), which leaves the strides of dimensions of one element as they are.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def words_of(span: range, bits: int) -> tuple[range, slice]:
    """The words that have a span of codes, and the place of the span in their codes."""
    per_word = WORD // bits
    words = range(span.start // per_word, -(-span.stop // per_word))
    first = span.start - words.start * per_word
    return words, slice(first, first + len(span))


def num_words(codes: int, bits: int) -> int:
    """Words for a number of codes."""
    return -(-codes * bits // WORD)


def describe_groups(kind: str, width: int, columns: int) -> str:
    """The kind of a matrix with groups of ``width`` columns."""
    return f"{kind} by rows" if width >= columns else f"{kind} in groups of {width}"


def group_index(module: StoredModule, ending: str, columns: range, groups: int) -> Tensor | None:
    """int64 [columns]: the group of each; None if all are -1. Raises CheckpointError if there is no such group."""
    import torch

    index = module.read(ending, torch.int64, columns)
    if bool((index == -1).all()):
        return None
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise module.refuse(ending, f"has numbers from {int(index.min())} to {int(index.max())} for {groups} groups")
    return index


@dataclass(frozen=True)
class PackedMatrix:
    """Codes of 4 or 8 bits, packed along the rows of int32 ``weight_packed`` [out, words].

    A stored code or zero point is the signed number plus half of the range. Zero points are packed along the columns,
    or not packed. The tensor ``weight_shape`` is not read, because the configuration has the shape.
    """

    module: StoredModule
    bits: int
    shape: Shape
    scales: ScaleGrid
    zeros: ScaleGrid | None
    """Those that are not packed."""

    @property
    def kind(self) -> str:
        """The format."""
        further = " with zero points" if self._has_zeros else ""
        return describe_groups(f"int{self.bits}", self.scales.block[1], self.shape[1]) + further + self._in_any_order

    @property
    def coding(self) -> Coding | None:
        """As in StoredMatrix."""
        if self._in_any_order:
            return None
        return coding_of(self.bits, self.shape[1], self.scales.block[1], symmetric=not self._has_zeros)

    @property
    def _has_zeros(self) -> bool:
        return "weight_zero_point" in self.module.tensors

    @property
    def _in_any_order(self) -> str:
        return " of columns in any order" if "weight_g_idx" in self.module.tensors else ""

    def part(self, rows: range, columns: range) -> QuantizedPart:
        """As in StoredMatrix."""
        import torch

        words, within = words_of(columns, self.bits)
        codes = unpack(self.module.read("weight_packed", torch.int32, rows, words), self.bits)[:, within]
        order = self._order()
        read = columns if order is None else range(self.shape[1])
        scales, groups = self.scales.read(rows, read)
        if order is not None:
            groups = order[columns.start : columns.stop]
        return QuantizedPart(codes, scales, self._zeros(rows, read), groups)

    def _order(self) -> Tensor | None:
        """int64 [in]: the group of each column; None where groups are consecutive columns."""
        if "weight_g_idx" not in self.module.tensors:
            return None
        columns = self.shape[1]
        return group_index(self.module, "weight_g_idx", range(columns), -(-columns // self.scales.block[1]))

    def _zeros(self, rows: range, columns: range) -> Tensor | float:
        """Those of the groups of some columns."""
        import torch

        middle = float(1 << (self.bits - 1))
        if self.zeros is not None:
            return self.zeros.read(rows, columns)[0] + middle
        if not self._has_zeros:
            return middle
        words, within = words_of(rows, self.bits)
        width = self.scales.block[1]
        across = range(columns.start // width, -(-columns.stop // width))
        packed = self.module.read("weight_zero_point", torch.int32, words, across)
        return unpack(packed.t(), self.bits).t()[within].float()


def packed_matrix(
    module: StoredModule, bits: int, block: tuple[int, int] | None, by: str, *, symmetric: bool
) -> PackedMatrix:
    """That of a module with ``weight_packed``, in the blocks that the field ``by`` gives, or a scale for each row."""
    stored = module.matrix_shape("weight_packed")
    rows, columns = stored[0], stored[1] * WORD // bits
    # The last word of a row may have room for more columns than the matrix has.
    if module.expected is not None and num_words(module.expected[-1], bits) == stored[1]:
        columns = module.expected[-1]
    module.check_type("weight_packed", ("I32",))
    scales, zeros = ScaleGrid.of(module, "weight_scale", (rows, columns), block, by), None
    if not symmetric or "weight_zero_point" in module.tensors:
        if module.tensor("weight_zero_point").kind == "I32":
            module.check("weight_zero_point", (num_words(rows, bits), -(-columns // scales.block[1])), by)
        else:
            zeros = ScaleGrid.of(module, "weight_zero_point", (rows, columns), block, by, _ZERO_TYPES)
    if "weight_g_idx" in module.tensors:
        module.check("weight_g_idx", (columns,), "the number of columns")
    return PackedMatrix(module, bits, (rows, columns), scales, zeros)


@dataclass(frozen=True)
class IntegerMatrix:
    """Signed codes in int8 ``weight`` [out, in], with signed zero points."""

    module: StoredModule
    scales: ScaleGrid
    zeros: ScaleGrid | None

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        return self.module.tensor("weight").shape

    @property
    def kind(self) -> str:
        """The format."""
        further = "" if self.zeros is None else " with zero points"
        return describe_groups("int8", self.scales.block[1], self.shape[1]) + further

    @property
    def coding(self) -> Coding | None:
        """As in StoredMatrix."""
        return coding_of(8, self.shape[1], self.scales.block[1], symmetric=self.zeros is None)

    def part(self, rows: range, columns: range) -> QuantizedPart:
        """As in StoredMatrix."""
        import torch

        codes = self.module.read("weight", torch.int8, rows, columns).view(torch.uint8) ^ 0x80
        scales, groups = self.scales.read(rows, columns)
        zeros = 128.0 if self.zeros is None else self.zeros.read(rows, columns)[0] + 128.0
        return QuantizedPart(codes, scales, zeros, groups)


def integer_matrix(module: StoredModule, block: tuple[int, int] | None, by: str, *, symmetric: bool) -> IntegerMatrix:
    """That of a module, with scales for the blocks that the field ``by`` gives, or as their stored shape says."""
    shape = module.matrix_shape("weight")
    scales, zeros = ScaleGrid.of(module, "weight_scale", shape, block, by), None
    if not symmetric or "weight_zero_point" in module.tensors:
        zeros = ScaleGrid.of(module, "weight_zero_point", shape, block, by, _ZERO_TYPES)
    return IntegerMatrix(module, scales, zeros)
