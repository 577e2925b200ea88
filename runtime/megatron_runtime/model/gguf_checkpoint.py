"""A GGUF file as a source of configuration and weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig, RopeScaling, refuse_architecture
from megatron_runtime.model.gguf_file import GgufFile, GgufTensor
from megatron_runtime.model.weights import StoredTensor, row_pieces

KNOWN_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""What ``general.architecture`` may be."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_INTERLEAVED_ROTARY = ("llama",)
"""Architectures whose converter permutes the rows of queries and keys for ggml's interleaved rotation."""


def gguf_config(file: GgufFile) -> ModelConfig:
    """The decoder that ``file`` holds; CheckpointError when its architecture or a value can't be served."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in KNOWN_ARCHITECTURES:
        raise refuse_architecture(str(file.path), architecture, KNOWN_ARCHITECTURES)
    values = _Metadata(file, architecture)
    if (parts := file.metadata.get("split.count", 0)) > 1:
        raise CheckpointError(
            f"{file.path}: is one of {parts} parts, expected a whole model. Merge it: llama-gguf-split --merge"
        )
    if experts := values.get("expert_count", 0):
        raise CheckpointError(
            f"{file.path}: a mixture of {experts} experts, expected a dense model. Choose a dense model"
        )
    heads, hidden = values.number("attention.head_count"), values.number("embedding_length")
    head_dim = int(values.get("attention.key_length", hidden // max(heads, 1)))
    values.require("attention.value_length", head_dim)
    values.require("rope.dimension_count", head_dim)
    names = file.tensors
    embedding = names.get("token_embd.weight")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0] if embedding else values.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.number("feed_forward_length"),
        num_layers=values.number("block_count"),
        num_attention_heads=heads,
        num_kv_heads=int(values.get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position_embeddings=values.number("context_length"),
        rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=float(values.get("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, values),
        tie_word_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        attention_output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        query_key_norm="head" if "blk.0.attn_q_norm.weight" in names else "none",
    )
    config.check(str(file.path))
    return config


def _rope_scaling(file: GgufFile, values: _Metadata) -> RopeScaling:
    kind = values.get("rope.scaling.type", "none")
    factor = float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 0.0)) or 1.0)
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return RopeScaling("linear", factor)
    if kind != "none":
        raise CheckpointError(f"{file.path}: rope scaling {kind!r} is not known; the known ones are none and linear")
    return RopeScaling()


class _Metadata:
    """The metadata under one architecture's prefix, with errors that name the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture

    def get(self, key: str, default: Any) -> Any:
        value = self._file.metadata.get(f"{self._prefix}.{key}", default)
        if type(value) is not type(default) and not (
            isinstance(value, int | float) and isinstance(default, int | float)
        ):
            raise CheckpointError(f"{self._file.path}: {self._prefix}.{key} is {_brief(value)}, expected one number")
        return value

    def number(self, key: str) -> int:
        if f"{self._prefix}.{key}" not in self._file.metadata:
            raise CheckpointError(f"{self._file.path}: {self._prefix}.{key} is missing. Convert the model again")
        return int(self.get(key, 0))

    def require(self, key: str, expected: int) -> None:
        if (value := self.get(key, expected)) != expected:
            raise CheckpointError(f"{self._file.path}: {self._prefix}.{key} is {value}, only {expected} is supported")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


class GgufWeights:
    """The tensors of a GGUF file, dequantized, under Hugging Face's names and in Hugging Face's row order."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._by_name = {
            _hugging_face_name(name): tensor for name, tensor in file.tensors.items() if name != _ROPE_FACTORS
        }

    @property
    def location(self) -> str:
        """The file's path."""
        return str(self._file.path)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What the file holds, but for the rotary factors."""
        return {name: StoredTensor(t.shape, t.num_bytes, t.kind.name) for name, t in self._by_name.items()}

    def read(self, name: str, into: Tensor) -> Iterator[int]:
        """Dequantize into ``into`` piece by piece; yields the stored bytes of each."""
        tensor = self._by_name[name]
        order = self._row_order(name, tensor)
        if into.dim() == 1:
            values = torch.from_numpy(self._file.rows(tensor, slice(0, 1))[0])
            into[slice(None) if order is None else order] = values.to(device=into.device, dtype=into.dtype)
            yield tensor.num_bytes
            return
        for part in row_pieces(tensor.shape):
            values = torch.from_numpy(self._file.rows(tensor, part))
            into[part if order is None else order[part]] = values.to(device=into.device, dtype=into.dtype)
            yield (part.stop - part.start) * tensor.row_bytes

    def rotary_factors(self) -> Tensor | None:
        """float32 [head_dim / 2], by which the rotary frequencies are divided (Llama 3.1); None without scaling."""
        tensor = self._file.tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return None
        expected = (self._config.head_dim // 2,)
        if tensor.shape != expected:
            raise CheckpointError(f"{self.location}: {_ROPE_FACTORS} has shape {tensor.shape}, expected {expected}")
        return torch.from_numpy(self._file.rows(tensor, slice(0, 1))[0].copy())

    def _row_order(self, name: str, tensor: GgufTensor) -> Tensor | None:
        """int64 [rows]: where each stored row of queries or keys goes; None where the order is the same.

        Stored per head are pairs (0, h/2), (1, h/2 + 1)... for a rotation of neighbours; ours turns half against half.
        """
        if self._config.architecture not in _INTERLEAVED_ROTARY or not re.search(r"\.[qk]_proj\.", name):
            return None
        rows = tensor.shape[0]
        return torch.arange(rows).view(-1, 2, self._config.head_dim // 2).transpose(1, 2).reshape(rows)


def _hugging_face_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name that has none is kept, and shows up as left over."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)
