"""The field ``quantization_config`` of a ``config.json``: which layout the quantized matrices have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields, read_json
from megatron_runtime.model.formats.quantization.awq import awq_checkpoint
from megatron_runtime.model.formats.quantization.compressed_tensors import compressed_checkpoint
from megatron_runtime.model.formats.quantization.float8 import float8_checkpoint
from megatron_runtime.model.formats.quantization.gptq import gptq_checkpoint
from megatron_runtime.model.formats.quantization.stored_matrix import CONFIG, StoredMatrix, StoredModule
from megatron_runtime.model.formats.tensor_names import tensor_names

_OLD_FIELD = "compression_config"
_METHOD = f"{CONFIG}.quant_method"
_FAMILY_WITH_MXFP4 = "gpt_oss"


class Quantization(Protocol):
    """How a checkpoint stores its quantized matrices."""

    @property
    def endings(self) -> frozenset[str]:
        """Ends of the names of the tensors of a quantized matrix, which follow the name of its module."""

    def matrix(self, module: StoredModule) -> StoredMatrix | None:
        """The matrix of a module that has tensors with such names; None if it isn't quantized.

        Raises CheckpointError if a tensor is missing, or has another shape than its configuration requires.
        """


_METHODS: Mapping[str, Callable[[ConfigFields], Quantization]] = {
    "fp8": float8_checkpoint,
    "fbgemm_fp8": float8_checkpoint,
    "modelopt": float8_checkpoint,
    "compressed-tensors": compressed_checkpoint,
    "gptq": gptq_checkpoint,
    "awq": awq_checkpoint,
}


def quantization_of(path: Path, config: ModelConfig) -> Quantization | None:
    """The quantization that ``path`` (a config.json) describes; None without one, or for the MXFP4 of gpt-oss, whose
    names `StackedExperts` knows.

    Raises CheckpointError if it is not supported.
    """
    whole = ConfigFields(path, read_json(path))
    given = next((fields for fields in (whole, whole.within("text_config")) if _has_any(fields)), None)
    if given is None:
        return None
    described = given.get(CONFIG, None, dict) or given.get(_OLD_FIELD, {}, dict)
    fields = ConfigFields(path, {f"{CONFIG}.{name}": value for name, value in described.items()})
    method = fields.get(_METHOD, "compressed-tensors" if "config_groups" in described else None, str)
    if method == "mxfp4" and config.architecture == _FAMILY_WITH_MXFP4:
        return None
    if method not in _METHODS:
        raise CheckpointError(
            f"{path}: {_METHOD} is {method!r}, the known ones are {', '.join(_METHODS)}, and mxfp4 for "
            f"{_FAMILY_WITH_MXFP4}. Choose a checkpoint of one of these kinds, a GGUF file, or one that isn't quantized"
        )
    if tensor_names(config.architecture).transposed:
        raise CheckpointError(
            f"{path}: {_METHOD} is {method!r}, but {config.architecture} is read without quantization only. "
            "Choose a checkpoint that isn't quantized"
        )
    return _METHODS[method](fields)


def _has_any(fields: ConfigFields) -> bool:
    return any(fields.get(name, {}, dict) for name in (CONFIG, _OLD_FIELD))
