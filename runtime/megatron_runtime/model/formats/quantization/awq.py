"""AWQ's layout ``gemm``: codes packed along the rows of the transposed matrix, eight in a word, in an order of its own.

Source: ``WQLinear_GEMM`` of AutoAWQ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.quantization.gptq import group_size
from megatron_runtime.model.formats.quantization.integers import WORD, describe_groups, unpack, words_of
from megatron_runtime.model.formats.quantization.kept_codes import coding_of
from megatron_runtime.model.formats.quantization.stored_matrix import (
    CONFIG,
    REMEDY,
    QuantizedPart,
    Shape,
    StoredMatrix,
    StoredModule,
    blocks_of,
    check_transposed,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_runtime.model.formats.coded_rows import Coding

_BITS = 4
_PER_WORD = WORD // _BITS
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each code in a word, from the lowest bits."""


@dataclass(frozen=True)
class AwqMatrix:
    """int32 ``qweight`` [in, out / 8] and ``qzeros`` [groups, out / 8]; ``scales`` [groups, out]."""

    module: StoredModule
    width: int
    """Columns of a group."""

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        columns, words = self.module.tensor("qweight").shape
        return words * _PER_WORD, columns

    @property
    def kind(self) -> str:
        """The format."""
        return describe_groups("AWQ int4", self.width, self.shape[1]) + " with zero points"

    @property
    def coding(self) -> Coding | None:
        """As in StoredMatrix."""
        return coding_of(_BITS, self.shape[1], self.width, symmetric=False)

    def part(self, rows: range, columns: range) -> QuantizedPart:
        """As in StoredMatrix."""
        import torch  # Imported here, because reading the header does not need it.

        groups, of_columns = blocks_of(columns, self.width)
        codes, zeros = self._read("qweight", columns, rows), self._read("qzeros", groups, rows)
        scales = self.module.read("scales", torch.float32, groups, rows)
        return QuantizedPart(codes.t(), scales.t(), zeros.t().float(), of_columns)

    def _read(self, ending: str, across: range, rows: range) -> Tensor:
        """Some codes of a packed tensor, uint8 [across, rows]."""
        import torch

        words, within = words_of(rows, _BITS)
        codes = unpack(self.module.read(ending, torch.int32, across, words), _BITS)
        in_order = codes.view(len(across), len(words), _PER_WORD)[..., torch.tensor(_PLACES)]
        return in_order.flatten(1)[:, within]


@dataclass(frozen=True)
class AwqCheckpoint:
    """Modules that ``modules_to_not_convert`` lists are stored as plain numbers."""

    group_size: int
    """-1: one group."""
    endings = frozenset({"qweight", "qzeros", "scales"})

    def matrix(self, module: StoredModule) -> StoredMatrix:
        """As in Quantization."""
        columns, words = module.matrix_shape("qweight")
        return AwqMatrix(module, check_transposed(module, (words * _PER_WORD, columns), words, self.group_size))


def awq_checkpoint(fields: ConfigFields) -> AwqCheckpoint:
    """From the fields of ``quantization_config``. Raises CheckpointError if one is not supported."""
    bits = fields.get(f"{CONFIG}.bits", MISSING, int)
    if bits != _BITS:
        raise CheckpointError(f"{fields.path}: {CONFIG}.bits is {bits}, expected 4. {REMEDY}")
    for name in ("version", "checkpoint_format", "format"):
        form = fields.get(f"{CONFIG}.{name}", "gemm", str)
        if form.lower() != "gemm":
            raise CheckpointError(f"{fields.path}: {CONFIG}.{name} is {form!r}, expected 'gemm'. {REMEDY}")
    fields.refuse(f"{CONFIG}.backend", "autoawq")
    return AwqCheckpoint(group_size(fields))
