"""Reads the header of a checkpoint without torch: the model and its tensors, and whether they match."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.checkpoint_path import checkpoint_path, torch_dist_folder
from megatron_runtime.model.formats.expected_tensors import expected_tensors
from megatron_runtime.model.formats.hugging_face_config import hugging_face_config
from megatron_runtime.model.formats.weight_source import WeightSource, check_weights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckpointSummary:
    """The metadata of a checkpoint. ``weight_bytes`` counts stored bytes, ``num_parameters`` loaded elements."""

    path: Path
    config: ModelConfig
    weight_bytes: int
    num_parameters: int
    source: WeightSource

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights after loading as ``dtype``."""
        return self.num_parameters * dtype.itemsize


def inspect_checkpoint(path: Path | str) -> CheckpointSummary:
    """Read only the metadata, and check that the tensors match the configuration.

    Raises CheckpointError with the file, the actual and the expected value, and the remedy.
    """
    config, source, _ = open_checkpoint(checkpoint_path(path))
    check_fit(config, source)
    return CheckpointSummary(
        path=Path(path),
        config=config,
        weight_bytes=sum(tensor.num_bytes for tensor in source.tensors.values()),
        num_parameters=sum(math.prod(shape) for shape in expected_tensors(config).values()),
        source=source,
    )


def open_checkpoint(path: Path) -> tuple[ModelConfig, WeightSource, NDArray[np.float32] | None]:
    """The contents of a checkpoint: the model, its tensors, and the divisors of the rotary frequencies, if any."""
    # Imported per format, because all readers together take as long to import as the headers take to read.
    if path.is_dir():
        config = hugging_face_config(path / "config.json")
        if (megatron := torch_dist_folder(path)) is None:
            return config, _safetensors(path, config), None
        from megatron_runtime.model.formats.torch_dist_checkpoint import TorchDistWeights

        return config, TorchDistWeights(megatron, config), None
    from megatron_runtime.model.formats.gguf_checkpoint import GgufWeights
    from megatron_runtime.model.formats.gguf_config import gguf_config
    from megatron_runtime.model.formats.gguf_file import GgufFile

    file = GgufFile(path)
    config = gguf_config(file)
    weights = GgufWeights(file, config)
    return config, weights, weights.rotary_factors()


def _safetensors(path: Path, config: ModelConfig) -> WeightSource:
    """The tensors of a folder with safetensors, whose quantized matrices expand."""
    from megatron_runtime.model.formats.quantization.quantization_config import quantization_of
    from megatron_runtime.model.formats.quantization.quantized_checkpoint import QuantizedCheckpoint
    from megatron_runtime.model.formats.safetensors_checkpoint import SafetensorsWeights
    from megatron_runtime.model.formats.stacked_experts import single_experts

    quantization = quantization_of(path / "config.json", config)
    files = SafetensorsWeights(path, config, quantized=quantization is not None)
    source = single_experts(files, config)
    return source if quantization is None else QuantizedCheckpoint(source, config, quantization)


def check_fit(config: ModelConfig, source: WeightSource) -> None:
    """Raise CheckpointError unless the tensors of ``source`` match ``config``; before any allocation."""
    experts = config.experts.count if config.experts is not None else 0
    for count, noun in ((config.num_layers, "layers"), (experts, "experts")):
        if count > len(source.tensors):
            raise CheckpointError(
                f"{source.location}: {count:,} {noun} expected by the configuration, "
                f"but only {len(source.tensors):,} tensors found. The configuration belongs to another checkpoint"
            )
    check_weights(source, expected_tensors(config))
