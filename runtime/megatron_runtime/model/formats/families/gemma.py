"""The text models of three generations of Gemma."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.llama import activation, llama, windows_by_pattern
from megatron_runtime.model.formats.rope_fields import rope_scaling


def gemma(fields: ConfigFields, *, rope_theta: float = 10000.0) -> ModelConfig:
    """Scaled embeddings, stored norm weights that are one less, GELU gates."""
    fields.refuse("use_bidirectional_attention", False)
    config = llama(fields, tied=True, rope_theta=rope_theta)
    return replace(
        config,
        norm="rms_plus_one",
        # Early files have a wrong hidden_act; hidden_activation has the right one.
        activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        embedding_multiplier=math.sqrt(max(config.hidden_size, 1)),
    )


def gemma2(fields: ConfigFields) -> ModelConfig:
    """Norms of inputs and outputs, soft caps, and a window in every other layer, starting with the first."""
    return _windows_and_caps(gemma(fields), fields, 2)


_GEMMA_3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""Defaults of fields that the larger models omit."""


def gemma3_with_vision(fields: ConfigFields) -> ModelConfig:
    """The text model of a multimodal Gemma 3; the vision model is ignored."""
    return replace(gemma3(fields.within("text_config").or_else({"model_type": "gemma3"})), architecture="gemma3")


def gemma3(fields: ConfigFields) -> ModelConfig:
    """Queries and keys normalized per head; five layers with a window and another rotary base alternate with one
    without.
    """
    fields = fields.or_else(_GEMMA_3_DEFAULTS)
    config = gemma(fields, rope_theta=1e6)
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", 6, int), int)
    rope = fields.within("rope_parameters")
    local, whole = rope.within("sliding_attention"), rope.within("full_attention")
    local.refuse("rope_type", "default")
    return replace(
        _windows_and_caps(config, fields, pattern),
        query_key_norm="head",
        rope_theta=whole.positive("rope_theta", config.rope_theta),
        rope_scaling=rope_scaling(whole, fields) if whole.get("rope_type", None, str) else config.rope_scaling,
        local_rope_theta=local.positive("rope_theta", fields.positive("rope_local_base_freq", 1e4)),
    )


def _windows_and_caps(config: ModelConfig, fields: ConfigFields, pattern: int) -> ModelConfig:
    window = fields.get("sliding_window", 4096, int)
    return replace(
        config,
        norm_placement="around",
        layer_windows=windows_by_pattern(fields, window, pattern, config.num_layers),
        attention_scale=fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_soft_cap=fields.positive("attn_logit_softcapping", None),
        logit_soft_cap=fields.positive("final_logit_softcapping", None),
    )
