"""Tensors as Hugging Face's files have them, made of rows of the tensors of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.model.formats.coded_rows import BLOCK, CODINGS
from megatron_runtime.model.formats.gguf_file import GgufTensor
from megatron_runtime.model.formats.tensor_names import TensorNames
from megatron_runtime.model.formats.weight_source import StoredTensor
from megatron_runtime.model.recurrent_config import GatedDeltaConfig, Mamba2Config, RecurrentConfig

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True)
class RowRange:
    """``count`` rows of a GGUF tensor from ``start`` on."""

    tensor: GgufTensor
    start: int
    count: int


@dataclass(frozen=True)
class TensorRows:
    """A tensor of this ``shape`` with the rows of one range, or of several after another."""

    shape: tuple[int, ...]
    ranges: tuple[RowRange, ...]
    column_groups: tuple[int, ...] = ()
    """The place of each of so many equal groups of columns in stored rows; empty where the order is the same."""

    @classmethod
    def whole(cls, tensor: GgufTensor) -> TensorRows:
        """All of a GGUF tensor."""
        return cls(tensor.shape, (RowRange(tensor, 0, tensor.num_rows),))

    def pieces(self, first: int, last: int) -> Iterator[tuple[GgufTensor, slice]]:
        """Where the rows from ``first`` to ``last`` are."""
        for part in self.ranges:
            begin, end = max(first, 0), min(last, part.count)
            if begin < end:
                yield part.tensor, slice(part.start + begin, part.start + end)
            first, last = first - part.count, last - part.count

    def in_order(self, stored: NDArray[_Number]) -> NDArray[_Number]:
        """Stored rows [n, columns] with the columns in order."""
        if not self.column_groups:
            return stored
        groups = stored.reshape(len(stored), len(self.column_groups), -1)
        return groups[:, list(self.column_groups)].reshape(stored.shape)

    @property
    def stored(self) -> StoredTensor:
        """As the interface of readers has it. Rows of different types, and parts of blocks, have no coding."""
        kinds = list(dict.fromkeys(str(part.tensor.kind.name) for part in self.ranges))
        has_blocks = not self.column_groups or self.shape[-1] // len(self.column_groups) % BLOCK == 0
        coding = CODINGS.get(kinds[0]) if len(kinds) == 1 and has_blocks else None
        num_bytes = sum(part.tensor.row_bytes * part.count for part in self.ranges)
        return StoredTensor(self.shape, num_bytes, "+".join(kinds), coding)


def expert_rows(tensor: GgufTensor, names: TensorNames, layer: str, part: str, kind: str) -> dict[str, TensorRows]:
    """The experts of a layer in a stacked ``tensor`` [experts, out, in] or [experts, out], by Hugging Face's names.

    That of the part ``gate_up`` has the rows of an expert's gates, then those of its values.
    """
    count, *shape = tensor.shape
    parts = {"gate": names.expert_gate_up[:1], "up": names.expert_gate_up[-1:], "down": (names.expert_down,)}
    fused = parts.get(part, names.expert_gate_up)
    prefix, rows = names.layer.format(layer), math.prod(shape[:-1]) // len(fused)
    shape[0] //= len(fused)
    return {
        f"{prefix}{names.expert.format(index)}{name}.{kind}": TensorRows(
            tuple(shape), (RowRange(tensor, (index * len(fused) + place) * rows, rows),)
        )
        for index in range(count)
        for place, name in enumerate(fused)
    }


def recurrent_inputs(mixed: TensorRows, gates: TensorRows, sizes: GatedDeltaConfig) -> TensorRows | None:
    """The matrix of the inputs of a gated delta layer; None if the shapes of its parts don't fit.

    It has for each key head its query and key, then the values and the gates of its value heads. Files have a matrix
    of all queries, keys and values, and one of the gates; those of earlier converters have the whole matrix.
    """
    if len(mixed.shape) != 2 or (mixed.shape[0], gates.shape) != (sizes.channels, (sizes.values, *mixed.shape[1:])):
        return None
    of_head = sizes.values // sizes.key_heads
    places = [(0, sizes.key_dim), (sizes.keys, sizes.key_dim), (2 * sizes.keys, of_head)]
    (all_mixed,), (all_gates,) = mixed.ranges, gates.ranges
    ranges: list[RowRange] = []
    for head in range(sizes.key_heads):
        ranges += (replace(all_mixed, start=at + head * count, count=count) for at, count in places)
        ranges.append(replace(all_gates, start=head * of_head, count=of_head))
    return TensorRows((sizes.channels + sizes.values, *mixed.shape[1:]), tuple(ranges))


def reshape_recurrent(tensors: dict[str, TensorRows], sizes: RecurrentConfig, names: TensorNames) -> None:
    """Give the tensors of recurrent layers Hugging Face's shapes, where files have as many numbers in other ones."""
    shapes: dict[str, tuple[int, ...]] = {
        names.log_rates: (sizes.value_heads,),
        names.skips: (sizes.value_heads,),
        f"{names.convolution}.weight": (sizes.channels, 1, sizes.taps),
    }
    if isinstance(sizes, Mamba2Config):
        shapes[f"{names.recurrent_norm}.weight"] = (sizes.values,)
    for name, shape in ((names.layer.format(layer) + name, shapes[name]) for layer in sizes.layers for name in shapes):
        rows = tensors.get(name)
        if rows is None or math.prod(rows.shape) != math.prod(shape):
            continue
        if len(shape) == 1 or rows.shape[-1] == shape[-1]:
            tensors[name] = replace(rows, shape=shape)


def order_value_heads(tensors: dict[str, TensorRows], sizes: GatedDeltaConfig, names: TensorNames) -> None:
    """Give the tensors of gated delta layers the value heads in Hugging Face's order, by key heads.

    llama.cpp's converter writes files of Qwen3.5 with the first value head of each key head, then the second one of
    each, and so on (``_LinearAttentionVReorderBase``). Tensors that don't fit stay as they are; their shapes are
    checked later.
    """
    if (shared := sizes.value_heads // sizes.key_heads) == 1:
        return
    places = tuple(head % shared * sizes.key_heads + head // shared for head in range(sizes.value_heads))
    inputs, gates = names.recurrent_inputs
    rows = {inputs: (2 * sizes.keys, sizes.value_dim), gates: (0, sizes.value_dim)}
    rows |= {names.convolution: rows[inputs]} | dict.fromkeys(names.recurrent_gates, (0, 1))
    for prefix in map(names.layer.format, sizes.layers):
        for name, (first, size) in ((f"{prefix}{name}.weight", at) for name, at in rows.items()):
            if (tensor := tensors.get(name)) is not None:
                (whole,) = tensor.ranges
                if whole.count == first + sizes.value_heads * size:
                    heads = (replace(whole, start=first + place * size, count=size) for place in places)
                    tensors[name] = replace(tensor, ranges=(replace(whole, count=first), *heads))
        for name in (names.log_rates, names.step_biases, f"{names.recurrent_output}.weight"):
            if (tensor := tensors.get(prefix + name)) is not None and tensor.shape[-1] % sizes.value_heads == 0:
                tensors[prefix + name] = replace(tensor, column_groups=places)
