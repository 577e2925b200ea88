"""A GGUF file as a source of weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.coded_rows import CodedRows
from megatron_runtime.model.formats.gguf_file import GgufFile
from megatron_runtime.model.formats.gguf_rows import (
    TensorRows,
    expert_rows,
    order_value_heads,
    recurrent_inputs,
    reshape_recurrent,
)
from megatron_runtime.model.formats.tensor_names import TensorNames, tensor_names
from megatron_runtime.model.formats.weight_source import StoredTensor, row_pieces
from megatron_runtime.model.recurrent_config import GatedDeltaConfig

if TYPE_CHECKING:
    from torch import Tensor

_Number = TypeVar("_Number", bound=np.generic)
_ROPE_FACTORS = "rope_freqs.weight"
_COMPUTED_ELSEWHERE = (_ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that change the rotation, and have no place in the decoder."""
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(weight|bias))?")
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_exps\.(weight|bias)")
_INTERLEAVED_ROTARY = ("llama", "ministral3")
"""Architectures whose converter permutes the rows of queries and keys for ggml's interleaved rotation."""


class GgufWeights:
    """The tensors of a GGUF file, dequantized, under Hugging Face's names and in Hugging Face's row order."""

    reads_in_threads = True

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        names = tensor_names(config.architecture)
        layer_names = _layer_names(names, config)
        layers = range(config.num_layers, config.num_layers + config.prediction_layers)
        further = tuple(f"blk.{layer}." for layer in layers)
        self._by_name: dict[str, TensorRows] = {}
        for name, tensor in file.tensors.items():
            match = _EXPERT_TENSOR.fullmatch(name)
            is_known = match is not None and (match[2] in ("up", "down") or len(names.expert_gate_up) == 2)
            has_rows = len(tensor.shape) >= (3 if match and match[2] == "gate_up" else 2)
            if match and is_known and has_rows and not name.startswith(further):
                self._by_name |= expert_rows(tensor, names, *match.groups())
            elif name not in _COMPUTED_ELSEWHERE and not name.startswith(further):
                rows = TensorRows.whole(tensor)
                if "_inp_shexp." in name and len(tensor.shape) == 1:
                    rows = replace(rows, shape=(1, *tensor.shape))  # a matrix of one row
                self._by_name[_hugging_face_name(name, names, layer_names)] = rows
        self._names = names
        has_joined_inputs = len(names.recurrent_inputs) == 1
        if isinstance(config.recurrent, GatedDeltaConfig) and has_joined_inputs:
            self._join_inputs(config.recurrent)
        if config.recurrent is not None:
            reshape_recurrent(self._by_name, config.recurrent, names)
        if isinstance(config.recurrent, GatedDeltaConfig) and not has_joined_inputs:
            order_value_heads(self._by_name, config.recurrent, names)

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
        order = self._row_order(name, into.shape[0])
        if into.dim() == 1:
            values = self._changed(name, torch.from_numpy(self._vector(rows)[start[0] : start[0] + len(into)]))
            into[slice(None) if order is None else order] = values.to(device=into.device, dtype=into.dtype)
            yield len(into)
            return
        columns = slice(start[-1], start[-1] + into.shape[-1])
        for part in row_pieces((into.shape[0], rows.shape[-1])):
            read = rows.in_order(self._rows(rows, start[0] + part.start, start[0] + part.stop))[:, columns]
            values = torch.from_numpy(read).view(-1, *into.shape[1:])
            into[part if order is None else order[part]] = values.to(device=into.device, dtype=into.dtype)
            yield values.numel()

    def read_coded(self, name: str, rows: range, columns: slice) -> Iterator[CodedRows]:
        """As in CodedSource. The rows of queries or keys are those of whole heads."""
        stored, first = self._by_name[name], rows.start
        kind, groups = str(stored.ranges[0].tensor.kind.name), stored.column_groups
        if (order := self._row_order(name, len(rows))) is not None:
            whole = self._raw_rows(stored, first, rows.stop)
            yield CodedRows.of(kind, whole, columns, rows=order.argsort().numpy(), column_groups=groups)
            return
        for part in row_pieces((len(rows), stored.shape[1])):
            raw = self._raw_rows(stored, first + part.start, first + part.stop)
            yield CodedRows.of(kind, raw, columns, column_groups=groups)

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

    def _rows(self, stored: TensorRows, first: int, last: int) -> NDArray[np.float32]:
        return _joined([self._file.rows(tensor, part) for tensor, part in stored.pieces(first, last)])

    def _raw_rows(self, stored: TensorRows, first: int, last: int) -> NDArray[np.uint8]:
        return _joined([self._file.stored_rows(tensor, part) for tensor, part in stored.pieces(first, last)])

    def _vector(self, stored: TensorRows) -> NDArray[np.float32]:
        """The numbers of a tensor of one dimension, which may be stored with more."""
        (part,) = stored.ranges
        count = math.prod(stored.shape) // max(part.tensor.shape[-1], 1)
        numbers = self._file.rows(part.tensor, slice(part.start, part.start + count)).reshape(1, -1)
        return stored.in_order(numbers).reshape(-1)

    def _changed(self, name: str, values: Tensor) -> Tensor:
        """A vector with the values of Hugging Face's files, where the converter stores others."""
        if name.endswith(self._names.log_rates):
            return (-values).log()
        is_plus_one = self._config.norm == "rms_plus_one" and not name.endswith(f"{self._names.recurrent_norm}.weight")
        return values - 1.0 if is_plus_one and name.endswith("norm.weight") else values

    def _join_inputs(self, sizes: GatedDeltaConfig) -> None:
        """Matrices that don't fit stay as they are, and are then reported as left over."""
        for layer in sizes.layers:
            names = [f"blk.{layer}.attn_{part}.weight" for part in ("qkv", "gate")]
            parts = [self._by_name[name] for name in names if name in self._by_name]
            if len(parts) == 2 and (whole := recurrent_inputs(parts[0], parts[1], sizes)) is not None:
                prefix = self._names.layer.format(layer)
                self._by_name[f"{prefix}{self._names.recurrent_inputs[0]}.weight"] = whole
                for name in names:
                    del self._by_name[name]

    def _row_order(self, name: str, rows: int) -> Tensor | None:
        """int64 [rows]: the destination of each stored row of queries or keys; None for the same order.

        Stored heads have pairs (0, h/2), (1, h/2 + 1)... for a rotation of adjacent rows; here the rotation is between
        halves. The rows are those of whole heads.
        """
        import torch

        if self._config.architecture not in _INTERLEAVED_ROTARY or not re.search(r"\.[qk]_proj\.", name):
            return None
        return torch.arange(rows).view(-1, 2, self._config.head_dim // 2).transpose(1, 2).reshape(rows)


def _joined(parts: list[NDArray[_Number]]) -> NDArray[_Number]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _layer_names(names: TensorNames, config: ModelConfig) -> dict[str, str]:
    """Hugging Face's names of a layer's tensors by those of ggml."""
    qkv = ("attn_q", "attn_k", "attn_v") if len(names.qkv) == 3 else ("attn_qkv",)
    if len(names.recurrent_inputs) == 2:
        recurrent = {
            **dict(zip(("attn_qkv", "attn_gate"), names.recurrent_inputs, strict=True)),
            **dict(zip(("ssm_beta", "ssm_alpha"), names.recurrent_gates, strict=True)),
        }
    else:
        recurrent = {"ssm_in": names.recurrent_inputs[0], "ssm_ba": names.recurrent_gates[0]}
    return {
        "attn_norm": names.attention_norm if config.feed_forward_layers is None else names.mixer_norm,
        "post_attention_norm": names.attention_output_norm,
        "ffn_norm": names.feed_forward_norm,
        "post_ffw_norm": names.feed_forward_output_norm,
        **dict(zip(qkv, names.qkv, strict=True)),
        "attn_output": names.attention_output,
        "attn_q_norm": names.query_norm,
        "attn_k_norm": names.key_norm,
        "ffn_gate_inp": names.router,
        **({"ffn_gate": names.gate_up[0]} if len(names.gate_up) == 2 else {}),
        "ffn_up": names.gate_up[-1],
        "ffn_down": names.down,
        "ffn_gate_inp_shexp": names.shared_expert_gate,
        **({"ffn_gate_shexp": names.shared_gate_up[0]} if len(names.shared_gate_up) == 2 else {}),
        "ffn_up_shexp": names.shared_gate_up[-1],
        "ffn_down_shexp": names.shared_down,
        "ssm_conv1d": names.convolution,
        "ssm_norm": names.recurrent_norm,
        "ssm_out": names.recurrent_output,
        **recurrent,
    }


def _hugging_face_name(name: str, names: TensorNames, layer_names: Mapping[str, str]) -> str:
    """Hugging Face's name of a GGUF tensor. An unknown name is kept, and then reported as left over."""
    match = _LAYER_TENSOR.fullmatch(name)
    whole_names = {
        "attn_sinks.weight": names.attention_sinks,
        "exp_probs_b.bias": names.selection_bias,
        "ssm_dt.bias": names.step_biases,
        "ssm_a": names.log_rates,
        "ssm_d": names.skips,
    }
    if match and (whole := whole_names.get(match[2] if match[3] is None else f"{match[2]}.{match[3]}")) is not None:
        return f"{names.layer.format(match[1])}{whole}"
    if match and match[3] is not None and match[2] in layer_names:
        return f"{names.layer.format(match[1])}{layer_names[match[2]]}.{match[3]}"
    top_names = {"token_embd": names.embedding, "output_norm": names.final_norm, "output": names.head}
    stem, _, kind = name.partition(".")
    return f"{top_names[stem]}.{kind}" if stem in top_names else name
