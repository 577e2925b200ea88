"""OpenAI's gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_runtime.model.config import ClampedGate, ExpertsConfig, ModelConfig, RoutingConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.expert_fields import num_experts
from megatron_runtime.model.formats.families.llama import llama, windows_by_pattern

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(fields: ConfigFields) -> ModelConfig:
    """Attention sinks, a window in every other layer, starting with the first, and experts with biases."""
    fields = fields.or_else({"attention_bias": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072})
    if all(fields.get(name, None, dict) is None for name in ("rope_parameters", "rope_scaling")):
        fields = fields.but(rope_scaling=_YARN)
    config = llama(fields, rope_theta=150000.0)
    window = fields.get("sliding_window", 128, int)
    return replace(
        config,
        mlp_bias=True,
        attention_sinks=True,
        layer_windows=windows_by_pattern(fields, window, 2, config.num_layers),
        clamped_gate=ClampedGate(fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0)),
        experts=ExpertsConfig(
            count=num_experts(fields),
            per_token=fields.get("num_experts_per_tok", fields.get("experts_per_token", 4, int), int),
            intermediate_size=config.intermediate_size,
            routing=RoutingConfig(normalize_weights=True, has_bias=True),
        ),
    )
