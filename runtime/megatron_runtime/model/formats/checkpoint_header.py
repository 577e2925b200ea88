"""What a checkpoint's header says, read without torch: its model and its tensors, and whether they fit together."""

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
    """What a checkpoint's metadata says; ``weight_bytes`` is what is stored, ``num_parameters`` what is loaded."""

    path: Path
    config: ModelConfig
    weight_bytes: int
    num_parameters: int

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """Memory that the weights take once loaded as ``dtype``."""
        return self.num_parameters * dtype.itemsize


def inspect_checkpoint(path: Path | str) -> CheckpointSummary:
    """Read the metadata alone and check that the tensors are those that the configuration asks for.

    CheckpointError names the file, what was found, what was expected and the remedy.
    """
    config, source, _ = open_checkpoint(checkpoint_path(path))
    check_fit(config, source)
    return CheckpointSummary(
        path=Path(path),
        config=config,
        weight_bytes=sum(tensor.num_bytes for tensor in source.tensors.values()),
        num_parameters=sum(math.prod(shape) for shape in expected_tensors(config).values()),
    )


def open_checkpoint(path: Path) -> tuple[ModelConfig, WeightSource, NDArray[np.float32] | None]:
    """What a checkpoint holds: its model, its tensors, and what rotary frequencies are divided by, if anything."""
    # Each format's reader is imported where it is needed: together they take as long as the headers.
    if path.is_dir():
        config = hugging_face_config(path / "config.json")
        if (megatron := torch_dist_folder(path)) is None:
            from megatron_runtime.model.formats.safetensors_checkpoint import SafetensorsWeights

            return config, SafetensorsWeights(path, config), None
        from megatron_runtime.model.formats.torch_dist_checkpoint import TorchDistWeights

        return config, TorchDistWeights(megatron, config), None
    from megatron_runtime.model.formats.gguf_checkpoint import GgufWeights
    from megatron_runtime.model.formats.gguf_config import gguf_config
    from megatron_runtime.model.formats.gguf_file import GgufFile

    file = GgufFile(path)
    config = gguf_config(file)
    weights = GgufWeights(file, config)
    return config, weights, weights.rotary_factors()


def check_fit(config: ModelConfig, source: WeightSource) -> None:
    """Raise CheckpointError unless the tensors of ``source`` are those of ``config``; before memory is taken for it."""
    experts = config.experts.count if config.experts is not None else 0
    for count, noun in ((config.num_layers, "layers"), (experts, "experts")):
        if count > len(source.tensors):
            raise CheckpointError(
                f"{source.location}: {count:,} {noun} expected by the configuration, "
                f"but only {len(source.tensors):,} tensors found. The configuration belongs to another checkpoint"
            )
    check_weights(source, expected_tensors(config))
