"""Qwen3-Next and Qwen3.5: most layers have a gated delta rule in place of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ExpertsConfig, ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.llama import listed_layers, llama
from megatron_runtime.model.formats.families.mixture import qwen_experts
from megatron_runtime.model.recurrent_config import GatedDeltaConfig


def qwen3_next(fields: ConfigFields) -> ModelConfig:
    """Gated delta layers, and experts beside a shared one."""
    config = _hybrid(fields)
    fields = fields.or_else({"norm_topk_prob": True})
    return replace(config, experts=_experts(fields, config.num_layers, per_token=10))


def qwen3_5_text(fields: ConfigFields) -> ModelConfig:
    """Gated delta layers and dense networks.

    The three positions of a token in an image are one for a token of a text: the rotation is the usual one.
    """
    fields.refuse("attn_output_gate", True)
    return _hybrid(fields)


def qwen3_5_moe_text(fields: ConfigFields) -> ModelConfig:
    """Gated delta layers, and experts beside a shared one, whose weights sum to one."""
    size = fields.get("moe_intermediate_size", 512, int)
    fields = fields.or_else({"moe_intermediate_size": size, "intermediate_size": size})
    config = qwen3_5_text(fields)
    experts = _experts(fields.but(norm_topk_prob=True), config.num_layers, per_token=8)
    return replace(config, experts=experts)


def qwen3_5(fields: ConfigFields) -> ModelConfig:
    """The text model of a multimodal Qwen3.5; the vision model is ignored."""
    return _within(fields, "qwen3_5", qwen3_5_text)


def qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    """The text model of a multimodal Qwen3.5 with experts."""
    return _within(fields, "qwen3_5_moe", qwen3_5_moe_text)


def _within(fields: ConfigFields, architecture: str, text_model: Callable[[ConfigFields], ModelConfig]) -> ModelConfig:
    config = text_model(fields.within("text_config").or_else({"model_type": f"{architecture}_text"}))
    tied = fields.get("tie_word_embeddings", config.tie_word_embeddings, bool)
    return replace(config, architecture=architecture, tie_word_embeddings=tied)


def _hybrid(fields: ConfigFields) -> ModelConfig:
    """Gated delta layers, and attention with gates that rotates a part of each head."""
    fields = fields.or_else({"head_dim": 256, "partial_rotary_factor": 0.25})
    fields.refuse("hidden_act", "silu")
    config = llama(fields)
    return replace(
        config,
        norm="rms_plus_one",
        query_key_norm="head",
        attention_output_gate=True,
        recurrent=_recurrent(fields, config.num_layers),
    )


def _experts(fields: ConfigFields, layers: int, *, per_token: int) -> ExpertsConfig:
    return replace(
        qwen_experts(fields, layers, per_token=per_token),
        shared_intermediate_size=fields.get("shared_expert_intermediate_size", 512, int),
        has_shared_expert_gate=True,
    )


def _recurrent(fields: ConfigFields, layers: int) -> GatedDeltaConfig:
    listed = listed_layers(fields, "linear_attention")
    if listed and len(listed) != layers:
        raise CheckpointError(f"{fields.path}: layer_types has {len(listed)} entries, expected {layers}")
    every = max(1, fields.get("full_attention_interval", 4, int))
    are_recurrent = listed or [(layer + 1) % every != 0 for layer in range(layers)]
    return GatedDeltaConfig(
        layers=frozenset(layer for layer, is_recurrent in enumerate(are_recurrent) if is_recurrent),
        key_heads=fields.get("linear_num_key_heads", 16, int),
        value_heads=fields.get("linear_num_value_heads", 32, int),
        key_dim=fields.get("linear_key_head_dim", 128, int),
        value_dim=fields.get("linear_value_head_dim", 128, int),
        taps=fields.get("linear_conv_kernel_dim", 4, int),
    )
