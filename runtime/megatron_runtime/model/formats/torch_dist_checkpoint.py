"""A Megatron ``torch_dist`` checkpoint of a GPT model as a source of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.tensor_names import tensor_names
from megatron_runtime.model.formats.torch_dist_file import TorchDistFile
from megatron_runtime.model.formats.torch_dist_layout import Entry, Piece, Rows, layer_layout, whole
from megatron_runtime.model.formats.weight_source import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron rounds the vocabulary up to whole tiles per rank."""
_OF_TRAINING = ("optimizer", "chained_", "opt_param_scheduler", "rng_state")


@dataclass(frozen=True)
class _Found:
    """Some rows of a Megatron tensor, or of one entry of a stacked one."""

    name: str
    index: tuple[int, ...]
    """The index in the leading dimensions, in which Megatron stacks layers and experts."""
    rows: Rows
    width: tuple[int, ...]
    """Shape of a row."""


@dataclass(frozen=True)
class _TensorPart:
    """The Megatron rows that form one of Hugging Face's tensors, in order."""

    found: tuple[_Found, ...]
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        stored = (sum(len(rows) for found in self.found for rows in found.rows), *self.found[0].width)
        return tuple(reversed(stored)) if self.transposed else stored


def _has_names(config: ModelConfig) -> bool:
    """Whether Megatron has names for all tensors."""
    return (
        config.norm_placement == "before"
        and config.query_key_norm in ("none", "head")
        and not (config.parallel_feed_forward or config.attention_sinks or config.norm == "layer_without_bias")
    )


class TorchDistWeights:
    """The tensors of ``folder`` under Hugging Face's names. The configuration is that of a user's ``config.json``.

    Megatron stores queries, keys and values in one matrix, group by group. Raises CheckpointError for models with norms
    of layer outputs or over all heads, and for others for which Megatron has no names.
    """

    reads_in_threads = False

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        if not _has_names(config):
            raise CheckpointError(
                f"{folder}: a Megatron checkpoint of {config.architecture}, which isn't read from this format. "
                "Convert it to safetensors"
            )
        self._folder = folder
        self._config = config
        self._names = tensor_names(config.architecture)
        self._file = TorchDistFile(folder)

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self._folder)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of the files, without the state of the optimizer."""
        tensors = {}
        for name, part in self._parts.items():
            dtype = self._file.tensors[part.found[0].name].properties.dtype
            num_bytes = math.prod(part.shape) * dtype.itemsize
            tensors[name] = StoredTensor(part.shape, num_bytes, dtype.name)
        used = {found.name for part in self._parts.values() for found in part.found}
        for name, stored in self._file.tensors.items():
            if name not in used and not name.startswith(_OF_TRAINING):
                tensors[name] = StoredTensor(tuple(stored.size), 0, stored.properties.dtype.name)
        return tensors

    def read(self, name: str, into: Tensor, start: Sequence[int]) -> Iterator[int]:
        """Copy a part into ``into``; yields its number of elements once."""
        part = self._parts[name]
        to, (first, *columns) = (into.t(), reversed(start)) if part.transposed else (into, start)
        within = tuple(slice(begin, begin + size) for begin, size in zip(columns, to.shape[1:], strict=True))
        before = 0
        for found in part.found:
            wanted = []
            for rows in found.rows:
                low, high = max(before, first), min(before + len(rows), first + len(to))
                if low < high:
                    wanted.append((low - first, range(rows.start + low - before, rows.start + high - before)))
                before += len(rows)
            self._copy(found, wanted, within, to)
        yield into.numel()

    def _copy(self, found: _Found, wanted: list[tuple[int, range]], within: tuple[slice, ...], to: Tensor) -> None:
        """The ``wanted`` rows of a stored tensor, each chunk with its first row in the result."""
        if not wanted:
            return
        lowest = min(rows.start for _, rows in wanted)
        stored = self._file.read(found.name, found.index, range(lowest, max(rows.stop for _, rows in wanted)))
        for place, rows in wanted:
            values = stored[(slice(rows.start - lowest, rows.stop - lowest), *within)]
            to[place : place + len(rows)] = values.to(device=to.device, dtype=to.dtype)

    @cached_property
    def _parts(self) -> dict[str, _TensorPart]:
        """By Hugging Face's name."""
        config, names = self._config, self._names
        outer = [
            ("embedding.word_embeddings.", names.embedding, config.vocab_size),
            ("embedding.position_embeddings.", names.learned_positions, config.learned_positions),
            ("decoder.final_layernorm.", names.final_norm, config.hidden_size),
            ("output_layer.", names.head, 0 if config.tie_word_embeddings else config.vocab_size),
        ]
        parts: dict[str, _TensorPart] = {}
        for megatron, name, total in outer:
            if total:
                parts |= self._entry(whole(megatron, name, total), None)
        for layer in range(config.num_layers):
            for entry in layer_layout(config, names, config.experts_of(layer)):
                parts |= self._entry(entry, layer)
        return parts

    def _entry(self, entry: Entry, layer: int | None) -> Iterator[tuple[str, _TensorPart]]:
        """The existing ones of weight and bias of ``entry``, in the first layout with all pieces."""
        prefix = "" if layer is None else self._names.layer.format(layer)
        for kind in ("weight", "bias"):
            for way in entry.ways:
                found = [self._locate(piece, kind, layer) for piece in way]
                if None not in found:
                    present = tuple(filter(None, found))
                    matrix = layer is not None and bool(present[0].width)
                    yield (
                        f"{prefix}{entry.name}{entry.joint}{kind}",
                        _TensorPart(present, self._names.transposed and matrix),
                    )
                    break

    def _locate(self, piece: Piece, kind: str, layer: int | None) -> _Found | None:
        """Where ``piece`` is stored: in a tensor of its layer or expert, or in one of all; None: nowhere."""
        for own_layer, own_expert in product((True, False), repeat=2):
            if (layer is None and not own_layer) or (piece.expert is None and not own_expert):
                continue
            stem = piece.stem.format(f"{piece.expert}." if piece.expert is not None and own_expert else "")
            within = "" if layer is None else f"decoder.layers.{layer}." if own_layer else "decoder.layers."
            name = f"{within}{stem}{kind}{piece.ending}"
            if name in self._file.tensors:
                index = self._index(name, None if own_layer else layer, None if own_expert else piece.expert)
                shape = tuple(self._file.tensors[name].size)[len(index) :]
                self._check_rows(name, shape, piece.total)
                return _Found(name, index, piece.rows, shape[1:])
        return None

    def _index(self, name: str, layer: int | None, expert: int | None) -> tuple[int, ...]:
        """The index in the leading dimensions of a tensor of several layers or experts, after a check of these
        dimensions.
        """
        experts = 0 if self._config.experts is None else self._config.experts.count
        stacks = [(layer, self._config.num_layers, "layers"), (expert, experts, "experts")]
        asked = [(place, expected, noun) for place, expected, noun in stacks if place is not None]
        sizes = tuple(self._file.tensors[name].size)
        for dimension, (_, expected, noun) in enumerate(asked):
            count = sizes[dimension] if dimension < len(sizes) else 0
            if count != expected:
                raise CheckpointError(
                    f"{self._folder}: tensor {name} has {count} {noun}, but the configuration expects {expected}. "
                    "The configuration belongs to another checkpoint"
                )
        return tuple(place for place, _, _ in asked)

    def _check_rows(self, stored: str, shape: tuple[int, ...], wanted: int) -> None:
        if not shape or shape[0] < wanted or (shape[0] > wanted and stored not in _PADDED):
            raise CheckpointError(
                f"{self._folder}: tensor {stored} has shape {list(shape)}, but the configuration expects {wanted} "
                "rows. The configuration belongs to another checkpoint"
            )
