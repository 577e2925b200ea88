"""A Megatron ``torch_dist`` checkpoint of a GPT model as a source of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.tensor_names import tensor_names
from megatron_runtime.model.torch_dist_file import TorchDistFile
from megatron_runtime.model.torch_dist_layout import Rows, layer_layout
from megatron_runtime.model.weights import StoredTensor

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron rounds the vocabulary up to whole tiles per rank."""
_OF_TRAINING = ("optimizer", "chained_", "opt_param_scheduler", "rng_state")


@dataclass(frozen=True)
class _Part:
    """Some rows of a Megatron tensor."""

    name: str
    layer: int | None
    """Entry of the first dimension, in which Megatron stacks the layers; None: it isn't stacked."""
    rows: Rows
    shape: tuple[int, ...]
    transposed: bool


class TorchDistWeights:
    """The tensors of ``folder`` under Hugging Face's names. The configuration is that of a ``config.json`` beside them.

    Megatron keeps queries, keys and values in one matrix, group by group, and gate and up in another. CheckpointError
    for models with experts or norms behind their layers, whose names in Megatron aren't known here.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        if config.experts is not None or config.norm_placement != "before":
            raise CheckpointError(
                f"{folder}: a Megatron checkpoint of {config.architecture}, which isn't read from this format. "
                "Convert it to safetensors"
            )
        self._folder = folder
        self._config = config
        self._file = TorchDistFile(folder)

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self._folder)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What the files hold, but for the state of a training."""
        found = {}
        for name, part in self._parts.items():
            dtype = self._file.tensors[part.name].properties.dtype
            shape = tuple(reversed(part.shape)) if part.transposed else part.shape
            found[name] = StoredTensor(shape, math.prod(shape) * dtype.itemsize, str(dtype).removeprefix("torch."))
        used = {part.name for part in self._parts.values()}
        for name, stored in self._file.tensors.items():
            if name not in used and not name.startswith(_OF_TRAINING):
                found[name] = StoredTensor(tuple(stored.size), 0, str(stored.properties.dtype))
        return found

    def read(self, name: str, into: Tensor) -> Iterator[int]:
        """Copy into ``into``; yields the stored bytes once."""
        part = self._parts[name]
        whole = self._file.read(part.name, part.layer)
        to = into.t() if part.transposed else into
        done = 0
        for rows in part.rows:
            to[done : done + len(rows)] = whole[rows.start : rows.stop].to(device=into.device, dtype=into.dtype)
            done += len(rows)
        yield self.tensors[name].num_bytes

    @cached_property
    def _parts(self) -> dict[str, _Part]:
        """By Hugging Face's name."""
        config, names = self._config, tensor_names(self._config.architecture)
        outer = [
            ("embedding.word_embeddings.", names.embedding, config.vocab_size),
            ("embedding.position_embeddings.", names.learned_positions, config.learned_positions),
            ("decoder.final_layernorm.", names.final_norm, config.hidden_size),
            ("output_layer.", names.head, 0 if config.tie_word_embeddings else config.vocab_size),
        ]
        parts: dict[str, _Part] = {}
        for megatron, name, total in outer:
            if total:
                parts |= self._found(megatron, None, name, (range(total),), total)
        layout = layer_layout(config, names)
        for layer in range(config.num_layers):
            for megatron, name, rows, total in layout:
                parts |= self._found(megatron, layer, names.layer.format(layer) + name, rows, total)
        return parts

    def _found(self, prefix: str, layer: int | None, name: str, rows: Rows, total: int) -> dict[str, _Part]:
        """Weight and bias, as far as there are any, of what Megatron calls ``prefix`` and Hugging Face ``name``.

        ``rows`` are taken from ``total``, or from more in a padded vocabulary.
        """
        parts = {}
        for kind in ("weight", "bias"):
            located = self._locate(f"{prefix}{kind}", layer)
            if located is None:
                continue
            stored, entry = located
            shape = tuple(self._file.tensors[stored].size)[0 if entry is None else 1 :]
            self._check_rows(stored, shape, total)
            transposed = tensor_names(self._config.architecture).transposed and layer is not None and len(shape) == 2
            parts[f"{name}.{kind}"] = _Part(stored, entry, rows, (sum(map(len, rows)), *shape[1:]), transposed)
        return parts

    def _locate(self, name: str, layer: int | None) -> tuple[str, int | None] | None:
        """The stored name, and the entry in it where layers are stacked; None when there is no such tensor."""
        stored = self._file.tensors
        if layer is None:
            return (name, None) if name in stored else None
        if (own := f"decoder.layers.{layer}.{name}") in stored:
            return own, None
        stacked = f"decoder.layers.{name}"
        if stacked not in stored:
            return None
        if (count := next(iter(stored[stacked].size), 0)) != self._config.num_layers:
            raise CheckpointError(
                f"{self._folder}: tensor {stacked} has {count} layers, but the configuration expects "
                f"{self._config.num_layers}. The configuration belongs to another checkpoint"
            )
        return stacked, layer

    def _check_rows(self, stored: str, shape: tuple[int, ...], wanted: int) -> None:
        if not shape or shape[0] < wanted or (shape[0] > wanted and stored not in _PADDED):
            raise CheckpointError(
                f"{self._folder}: tensor {stored} has shape {list(shape)}, but the configuration expects {wanted} "
                "rows. The configuration belongs to another checkpoint"
            )
