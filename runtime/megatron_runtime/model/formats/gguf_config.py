"""The metadata of a GGUF file as the configuration of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import (
    ExpertsConfig,
    ModelConfig,
    RopeScaling,
    RoutingConfig,
    alternating_windows,
    check_num_layers,
    refuse_architecture,
)
from megatron_runtime.model.formats.gguf_file import GgufFile
from megatron_runtime.model.formats.rope_fields import yarn_magnitude


def gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration in ``file``. Raises CheckpointError for an unsupported architecture or value."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise refuse_architecture(str(file.path), architecture, _FAMILIES)
    values = _Metadata(file, architecture)
    heads, hidden = values.number("attention.head_count"), values.number("embedding_length")
    head_dim = int(values.get("attention.key_length", hidden // max(heads, 1)))
    values.require("attention.value_length", head_dim)
    values.require("rope.dimension_count", head_dim)
    names = file.tensors
    scaling = _rope_scaling(file, values)
    length = values.number("context_length")
    if scaling.kind == "yarn":  # some converters omit the length
        length = max(length, int(scaling.factor * scaling.original_max_position_embeddings))
    embedding = names.get("token_embd.weight")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0] if embedding else values.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.number("feed_forward_length"),
        num_layers=check_num_layers(str(file.path), values.number("block_count")),
        num_attention_heads=heads,
        num_kv_heads=int(values.get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=float(values.get("attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=float(values.get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        attention_output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        query_key_norm="head" if "blk.0.attn_q_norm.weight" in names else "none",
        experts=_experts(values),
    )
    config = _FAMILIES[architecture](config, values)
    config.check(str(file.path))
    return config


def _experts(values: _Metadata) -> ExpertsConfig | None:
    """The same value in all layers; None without any."""
    count = int(values.get("expert_count", 0))
    if count == 0:
        return None
    values.require("expert_shared_count", 0)
    return ExpertsConfig(
        count=count,
        per_token=values.number("expert_used_count"),
        intermediate_size=int(values.get("expert_feed_forward_length", values.number("feed_forward_length"))),
        routing=RoutingConfig(normalize_weights=bool(values.get("expert_weights_norm", True))),
    )


def _as_it_is(config: ModelConfig, _: _Metadata) -> ModelConfig:
    return config


def _gemma(config: ModelConfig, _: _Metadata) -> ModelConfig:
    return replace(
        config,
        norm="rms_plus_one",
        activation="gelu_tanh",
        embedding_multiplier=math.sqrt(max(config.hidden_size, 1)),
    )


def _gemma2(config: ModelConfig, values: _Metadata) -> ModelConfig:
    return _windows_and_caps(_gemma(config, values), values, pattern=2, narrow_scores=46)


def _gemma3(config: ModelConfig, values: _Metadata) -> ModelConfig:
    config = _windows_and_caps(_gemma(config, values), values, pattern=6, narrow_scores=62)
    return replace(config, local_rope_theta=float(values.get("rope.freq_base_swa", 10000.0)))


def _windows_and_caps(config: ModelConfig, values: _Metadata, *, pattern: int, narrow_scores: int) -> ModelConfig:
    """Norms of inputs and outputs, a window in all layers but every ``pattern``-th, and soft caps.

    The file does not contain the scale of the scores. As in llama.cpp, the largest model of each generation, detected
    by its ``narrow_scores`` layers, has the scale of heads that share the hidden size; the others have that of their
    heads.
    """
    pattern = max(int(values.get("attention.sliding_window_pattern", pattern)), 1)
    window = int(values.get("attention.sliding_window", 0))
    heads = max(config.num_attention_heads, 1)
    scaled_by = config.hidden_size // heads if config.num_layers == narrow_scores else config.head_dim
    return replace(
        config,
        norm_placement="around",
        layer_windows=alternating_windows(window, pattern, config.num_layers) if window > 0 else (),
        attention_scale=max(scaled_by, 1) ** -0.5,
        attention_soft_cap=values.soft_cap("attn_logit_softcapping"),
        logit_soft_cap=values.soft_cap("final_logit_softcapping"),
    )


_FAMILIES: dict[str, Callable[[ModelConfig, _Metadata], ModelConfig]] = {
    "llama": _as_it_is,
    "mistral": _as_it_is,
    "qwen2": _as_it_is,
    "qwen3": _as_it_is,
    "qwen3moe": _as_it_is,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""By ``general.architecture``: the change of a configuration that was read as Llama's."""


def _rope_scaling(file: GgufFile, values: _Metadata) -> RopeScaling:
    kind = values.get("rope.scaling.type", "none")
    factor = float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 0.0)) or 1.0)
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return RopeScaling("linear", factor)
    if kind == "yarn":
        return _yarn(values, factor)
    if kind != "none":
        raise CheckpointError(
            f"{file.path}: rope scaling {kind!r} is not known; the known ones are none, linear and yarn"
        )
    return RopeScaling()


def _yarn(values: _Metadata, factor: float) -> RopeScaling:
    """Without the corrections that llama.cpp applies to other families."""
    for key, neutral in (("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        values.require(f"rope.scaling.{key}", neutral)
    return RopeScaling(
        "yarn",
        factor,
        low_frequency_factor=float(values.get("rope.scaling.yarn_beta_slow", 1.0)),
        high_frequency_factor=float(values.get("rope.scaling.yarn_beta_fast", 32.0)),
        original_max_position_embeddings=values.number("rope.scaling.original_context_length"),
        magnitude=yarn_magnitude(factor),
    )


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

    def soft_cap(self, key: str) -> float | None:
        cap = float(self.get(key, 0.0))
        return cap if cap > 0.0 else None

    def require(self, key: str, expected: float) -> None:
        if (value := self.get(key, expected)) != expected:
            raise CheckpointError(f"{self._file.path}: {self._prefix}.{key} is {value}, only {expected} is supported")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
