"""GPTQ's layout: codes packed along the columns of the transposed matrix, and groups of columns in any order.

Sources: ``QuantLinear`` of AutoGPTQ and of GPTQModel. The first version of the format stores zero points less one; what
GPTQModel calls ``gptq_v2`` stores them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.quantization.integers import (
    WORD,
    describe_groups,
    group_index,
    num_words,
    unpack,
    words_of,
)
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
    from megatron_runtime.model.formats.coded_rows import Coding

_BITS = (4, 8)
_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class GptqMatrix:
    """int32 ``qweight`` [in / codes per word, out] and ``qzeros`` [groups, out / codes per word]; ``scales`` [groups,
    out]; int32 ``g_idx`` [in], without which groups are consecutive columns.
    """

    module: StoredModule
    width: int
    """Columns of a group."""
    settings: GptqCheckpoint

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        words, rows = self.module.tensor("qweight").shape
        return rows, words * WORD // self.settings.bits

    @property
    def kind(self) -> str:
        """The format."""
        further = "" if self.settings.symmetric else " with zero points"
        order = " of columns in any order" if self.settings.in_any_order else ""
        return describe_groups(f"GPTQ int{self.settings.bits}", self.width, self.shape[1]) + further + order

    @property
    def coding(self) -> Coding | None:
        """As in StoredMatrix."""
        if self.settings.in_any_order:
            return None
        return coding_of(self.settings.bits, self.shape[1], self.width, symmetric=self.settings.symmetric)

    def part(self, rows: range, columns: range) -> QuantizedPart:
        """As in StoredMatrix."""
        import torch  # Imported here, because reading the header does not need it.

        bits = self.settings.bits
        words, within = words_of(columns, bits)
        codes = unpack(self.module.read("qweight", torch.int32, words, rows).t(), bits)[:, within]
        grid, groups = range(self.module.tensor("scales").shape[0]), None
        if "g_idx" in self.module.tensors:
            groups = group_index(self.module, "g_idx", columns, len(grid))
        if groups is None:
            grid, groups = blocks_of(columns, self.width)
        scales = self.module.read("scales", torch.float32, grid, rows).t()
        words, within = words_of(rows, bits)
        zeros = unpack(self.module.read("qzeros", torch.int32, grid, words), bits)[:, within].t()
        if self.settings.less_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return QuantizedPart(codes, scales, zeros.float(), groups)


@dataclass(frozen=True)
class GptqCheckpoint:
    """Modules that ``modules_in_block_to_quantize`` or ``dynamic`` leave out are stored as plain numbers."""

    bits: int
    group_size: int
    """-1: one group."""
    less_one: bool
    """Whether the stored zero points are less one."""
    symmetric: bool
    """Whether all zero points are the middle of the range."""
    in_any_order: bool
    """Whether groups are of columns in any order."""
    endings = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def matrix(self, module: StoredModule) -> StoredMatrix:
        """As in Quantization."""
        stored = module.matrix_shape("qweight")
        rows, columns = stored[1], stored[0] * WORD // self.bits
        width = check_transposed(module, (rows, columns), num_words(rows, self.bits), self.group_size)
        if self.in_any_order or "g_idx" in module.tensors:
            module.check("g_idx", (columns,), f"{CONFIG}.bits")
        return GptqMatrix(module, width, self)


def gptq_checkpoint(fields: ConfigFields) -> GptqCheckpoint:
    """From the fields of ``quantization_config``. Raises CheckpointError if one is not supported."""
    bits = fields.get(f"{CONFIG}.bits", MISSING, int)
    if bits not in _BITS:
        raise CheckpointError(f"{fields.path}: {CONFIG}.bits is {bits}, expected 4 or 8. {REMEDY}")
    form = fields.get(f"{CONFIG}.checkpoint_format", fields.get(f"{CONFIG}.format", "gptq", str), str)
    if form not in _FORMATS:
        raise CheckpointError(
            f"{fields.path}: {CONFIG}.checkpoint_format is {form!r}, expected one of {', '.join(_FORMATS)}. {REMEDY}"
        )
    fields.refuse(f"{CONFIG}.is_marlin_format", False)
    fields.refuse(f"{CONFIG}.pack_dtype", "int32")
    _check_overrides(fields, bits)
    symmetric, in_any_order = (fields.get(f"{CONFIG}.{name}", False, bool) for name in ("sym", "desc_act"))
    return GptqCheckpoint(bits, group_size(fields), form == "gptq", symmetric, in_any_order)


def group_size(fields: ConfigFields) -> int:
    """The number of columns that share a scale, or -1 for all. Raises CheckpointError if it is another number."""
    found: int = fields.get(f"{CONFIG}.group_size", 128, int)
    if found != -1 and found < 1:
        raise CheckpointError(
            f"{fields.path}: {CONFIG}.group_size is {found}, expected -1, or 1 or more. Fetch the file again"
        )
    return found


def _check_overrides(fields: ConfigFields, bits: int) -> None:
    """Refuse modules with other settings; those with a name that begins with ``-:`` aren't quantized."""
    overrides: dict[str, Any] = fields.get(f"{CONFIG}.dynamic", {}, dict)
    for pattern, settings in overrides.items():
        for name in ("bits", "group_size") if isinstance(settings, dict) and not pattern.startswith("-:") else ():
            expected = bits if name == "bits" else group_size(fields)
            if settings.get(name, expected) != expected:
                raise CheckpointError(
                    f"{fields.path}: {CONFIG}.dynamic has {name} {settings[name]} for {pattern}, expected {expected} "
                    f"as for all modules. {REMEDY}"
                )
