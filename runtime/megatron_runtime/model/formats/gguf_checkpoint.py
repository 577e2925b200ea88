"""A GGUF file as a source of weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.coded_rows import CODINGS, CodedRows, decode
from megatron_runtime.model.formats.gguf_file import GgufFile, GgufTensor
from megatron_runtime.model.formats.tensor_names import TensorNames, tensor_names
from megatron_runtime.model.formats.weight_source import StoredTensor, row_pieces

if TYPE_CHECKING:
    from torch import Tensor

_ROPE_FACTORS = "rope_freqs.weight"
_COMPUTED_ELSEWHERE = (_ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that change the rotation, and have no place in the decoder."""
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
_INTERLEAVED_ROTARY = ("llama", "ministral3")
"""Architectures whose converter permutes the rows of queries and keys for ggml's interleaved rotation."""


class GgufWeights:
    """The tensors of a GGUF file, dequantized, under Hugging Face's names and in Hugging Face's row order."""

    reads_codes_in_threads = True

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        names = tensor_names(config.architecture)
        layer_names = _layer_names(names)
        layers = range(config.num_layers, config.num_layers + config.prediction_layers)
        further = tuple(f"blk.{layer}." for layer in layers)
        self._by_name: dict[str, _Rows] = {}
        for name, tensor in file.tensors.items():
            match = _EXPERT_TENSOR.fullmatch(name)
            if match and len(tensor.shape) >= 2 and not name.startswith(further):
                self._by_name |= _expert_rows(tensor, names, *match.groups())
            elif name not in _COMPUTED_ELSEWHERE and not name.startswith(further):
                rows = _Rows(tensor, tensor.shape, 0)
                if "_inp_shexp." in name and len(tensor.shape) == 1:  # a matrix of one row
                    rows = _Rows(tensor, (1, *tensor.shape), 0)
                self._by_name[_hugging_face_name(name, names, layer_names)] = rows

    @property
    def location(self) -> str:
        """The file's path."""
        return str(self._file.path)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of the file, without the rotary factors."""
        return {name: rows.stored for name, rows in self._by_name.items()}

    def read(self, name: str, into: Tensor, start: Sequence[int]) -> Iterator[int]:
        """Dequantize a part into ``into`` in chunks; yields the number of elements of each."""
        import torch  # Imported here, because reading the header does not need it.

        rows = self._by_name[name]
        tensor = rows.tensor
        order = self._row_order(name, into.shape[0])
        if into.dim() == 1:
            values = torch.from_numpy(self._file.rows(tensor, slice(rows.start, rows.start + 1))[0])
            values = values[start[0] : start[0] + len(into)]
            if self._config.norm == "rms_plus_one" and name.endswith("norm.weight"):
                values = values - 1.0  # The converter adds the one that the norm adds here.
            into[slice(None) if order is None else order] = values.to(device=into.device, dtype=into.dtype)
            yield len(into)
            return
        first, columns = rows.start + start[0], slice(start[1], start[1] + into.shape[1])
        for part in row_pieces((into.shape[0], rows.shape[1])):
            values = torch.from_numpy(self._file.rows(tensor, slice(first + part.start, first + part.stop))[:, columns])
            into[part if order is None else order[part]] = values.to(device=into.device, dtype=into.dtype)
            yield values.numel()

    def read_coded(self, name: str, rows: range, columns: slice) -> Iterator[CodedRows]:
        """As in CodedSource. The rows of queries or keys are those of whole heads."""
        stored = self._by_name[name]
        order, first = self._row_order(name, len(rows)), stored.start + rows.start
        if order is not None:
            whole = self._file.stored_rows(stored.tensor, slice(first, first + len(rows)))[order.argsort().numpy()]
        for part in row_pieces((len(rows), stored.shape[1])):
            if order is not None:
                raw = whole[part]
            else:
                raw = self._file.stored_rows(stored.tensor, slice(first + part.start, first + part.stop))
            yield decode(raw, stored.tensor.kind, columns)

    def rotary_factors(self) -> NDArray[np.float32] | None:
        """float32 [head_dim / 2], the divisors of the rotary frequencies (Llama 3.1); None without scaling."""
        tensor = self._file.tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return None
        expected = (self._config.head_dim // 2,)
        if tensor.shape != expected:
            raise CheckpointError(f"{self.location}: {_ROPE_FACTORS} has shape {tensor.shape}, expected {expected}")
        factors: NDArray[np.float32] = self._file.rows(tensor, slice(0, 1))[0].copy()
        return factors

    def _row_order(self, name: str, rows: int) -> Tensor | None:
        """int64 [rows]: the destination of each stored row of queries or keys; None for the same order.

        Stored heads have pairs (0, h/2), (1, h/2 + 1)... for a rotation of adjacent rows; here the rotation is between
        halves. The rows are those of whole heads.
        """
        import torch

        if self._config.architecture not in _INTERLEAVED_ROTARY or not re.search(r"\.[qk]_proj\.", name):
            return None
        return torch.arange(rows).view(-1, 2, self._config.head_dim // 2).transpose(1, 2).reshape(rows)


@dataclass(frozen=True)
class _Rows:
    """A GGUF tensor, or one expert's rows of it from ``start`` on, with the ``shape`` of that part."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes * math.prod(self.shape) // max(math.prod(self.tensor.shape), 1)

    @property
    def stored(self) -> StoredTensor:
        kind = str(self.tensor.kind.name)
        return StoredTensor(self.shape, self.num_bytes, kind, CODINGS.get(kind))


def _expert_rows(tensor: GgufTensor, names: TensorNames, layer: str, part: str, kind: str) -> dict[str, _Rows]:
    """The experts of a layer in a stacked ``tensor`` [experts, out, in] or [experts, out], by Hugging Face's names."""
    count, *shape = tensor.shape
    gate, up = names.expert_gate_up
    name = {"gate": gate, "up": up, "down": names.expert_down}[part]
    prefix = names.layer.format(layer)
    return {
        f"{prefix}{names.expert.format(index)}{name}.{kind}": _Rows(tensor, tuple(shape), index * math.prod(shape[:-1]))
        for index in range(count)
    }


def _layer_names(names: TensorNames) -> dict[str, str]:
    """Hugging Face's names of a layer's tensors by those of ggml."""
    qkv = ("attn_q", "attn_k", "attn_v") if len(names.qkv) == 3 else ("attn_qkv",)
    shared_gate, shared_up = names.shared_gate_up
    return {
        "attn_norm": names.attention_norm,
        "post_attention_norm": names.attention_output_norm,
        "ffn_norm": names.feed_forward_norm,
        "post_ffw_norm": names.feed_forward_output_norm,
        **dict(zip(qkv, names.qkv, strict=True)),
        "attn_output": names.attention_output,
        "attn_q_norm": names.query_norm,
        "attn_k_norm": names.key_norm,
        "ffn_gate_inp": names.router,
        "ffn_gate": names.gate_up[0],
        "ffn_up": names.gate_up[-1],
        "ffn_down": names.down,
        "ffn_gate_inp_shexp": names.shared_expert_gate,
        "ffn_gate_shexp": shared_gate,
        "ffn_up_shexp": shared_up,
        "ffn_down_shexp": names.shared_down,
    }


def _hugging_face_name(name: str, names: TensorNames, layer_names: Mapping[str, str]) -> str:
    """Hugging Face's name of a GGUF tensor. An unknown name is kept, and then reported as left over."""
    match = _LAYER_TENSOR.fullmatch(name)
    whole_names = {"attn_sinks.weight": names.attention_sinks, "exp_probs_b.bias": names.selection_bias}
    if match and (whole := whole_names.get(f"{match[2]}.{match[3]}")) is not None:
        return f"{names.layer.format(match[1])}{whole}"
    if match and match[2] in layer_names:
        return f"{names.layer.format(match[1])}{layer_names[match[2]]}.{match[3]}"
    top_names = {"token_embd": names.embedding, "output_norm": names.final_norm, "output": names.head}
    stem, _, kind = name.partition(".")
    return f"{top_names[stem]}.{kind}" if stem in top_names else name
