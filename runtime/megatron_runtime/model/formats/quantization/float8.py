"""Matrices of 8-bit floating-point numbers with scales: for all weights, for each row, or for each block.

Sources: DeepSeek-V3's ``inference/kernel.py`` (``weight_dequant``); compressed-tensors' format ``float-quantized``;
``FbgemmFp8Linear`` of transformers. The stored scale is a factor, also where its name ends in ``_inv``.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.quantization.stored_matrix import (
    CONFIG,
    QuantizedPart,
    ScaleGrid,
    Shape,
    StoredMatrix,
    StoredModule,
)
from megatron_runtime.model.formats.weight_source import Float8Coding

FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""The types of safetensors, with those of torch."""
_SCALES = ("weight_scale_inv", "weight_scale")
_USUAL_BLOCK = (128, 128)


@dataclass(frozen=True)
class Float8Matrix:
    """A matrix [out, in] of one of the types in FLOAT8."""

    module: StoredModule
    scales: ScaleGrid

    @property
    def shape(self) -> Shape:
        """Rows and columns."""
        return self.module.tensor("weight").shape

    @property
    def kind(self) -> str:
        """The stored type."""
        return self.module.tensor("weight").kind

    @property
    def coding(self) -> None:
        """None: the kernels of CPUs compute with integers."""

    @property
    def float8(self) -> Float8Coding:
        """For the kernels of GPUs."""
        return Float8Coding(FLOAT8[self.kind], self.scales.block[1])

    def part(self, rows: range, columns: range) -> QuantizedPart:
        """As in StoredMatrix."""
        import torch  # Imported here, because reading the header does not need it.

        codes = self.module.read("weight", getattr(torch, FLOAT8[self.kind]), rows, columns)
        scales, groups = self.scales.read(rows, columns)
        return QuantizedPart(codes, scales, 0.0, groups)


def float8_matrix(module: StoredModule, block: tuple[int, int] | None, by: str) -> Float8Matrix:
    """That of a module, with scales for the blocks that the field ``by`` gives, or as their stored shape says."""
    shape = module.matrix_shape("weight")
    scale = next((ending for ending in _SCALES if ending in module.tensors), _SCALES[-1])
    stored = module.tensor(scale).shape
    usual = tuple(-(-size // of) for size, of in zip(shape, _USUAL_BLOCK, strict=True))
    if block is None and stored == usual and stored not in ((1, 1), (shape[0], 1)):
        block = _USUAL_BLOCK
    return Float8Matrix(module, ScaleGrid.of(module, scale, shape, block, by))


@dataclass(frozen=True)
class Float8Checkpoint:
    """``quant_method`` is ``fp8`` (DeepSeek, Qwen, MiniMax, Mistral, AutoFP8), ``fbgemm_fp8`` or ``modelopt``.

    Modules that ``modules_to_not_convert`` or ``ignored_layers`` lists are stored as plain numbers, which their stored
    types say.
    """

    block: tuple[int, int] | None
    endings = frozenset({"weight", *_SCALES})

    def matrix(self, module: StoredModule) -> StoredMatrix | None:
        """As in Quantization."""
        if "weight" in module.tensors and module.tensors["weight"].kind not in FLOAT8:
            return None
        return float8_matrix(module, self.block, f"{CONFIG}.weight_block_size")


def float8_checkpoint(fields: ConfigFields) -> Float8Checkpoint:
    """From the fields of ``quantization_config``. Raises CheckpointError if one is not supported."""
    fields.refuse(f"{CONFIG}.quant_algo", "FP8")  # of modelopt, which has others
    name = f"{CONFIG}.weight_block_size"
    block = fields.numbers(name, int)
    if block and (len(block) != 2 or min(block) < 1):
        raise CheckpointError(
            f"{fields.path}: {name} is {list(block)}, expected two numbers above 0. Fetch the file again"
        )
    return Float8Checkpoint((block[0], block[1]) if block else None)
