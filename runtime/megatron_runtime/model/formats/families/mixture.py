"""Families with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ExpertsConfig, ModelConfig, RoutingConfig
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.families.expert_fields import num_experts
from megatron_runtime.model.formats.families.llama import llama, mistral, qwen2, qwen3


def mixtral(fields: ConfigFields) -> ModelConfig:
    """Mistral with experts of the size of its feed-forward networks."""
    config = mistral(fields)
    experts = ExpertsConfig(
        count=fields.get("num_local_experts", MISSING, int),
        per_token=fields.get("num_experts_per_tok", 2, int),
        intermediate_size=config.intermediate_size,
        routing=RoutingConfig(normalize_weights=True),
    )
    return replace(config, experts=experts)


def qwen2_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen2 with small experts, and a large shared expert with a gate."""
    config = qwen2(fields)
    if not fields.get("layer_types", [], list):
        # Without the list, it is ambiguous which layers have a window.
        fields.refuse("use_sliding_window", False)
    return replace(
        config,
        qkv_bias=fields.get("qkv_bias", True, bool),
        experts=replace(
            qwen_experts(fields, config.num_layers, per_token=4),
            shared_intermediate_size=fields.get("shared_expert_intermediate_size", MISSING, int),
            has_shared_expert_gate=True,
        ),
    )


def qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen3 with small experts in the layers that the file selects."""
    config = qwen3(fields)
    return replace(config, experts=qwen_experts(fields, config.num_layers, per_token=8))


def minimax_m2(fields: ConfigFields) -> ModelConfig:
    """Queries and keys normalized over all heads, a part of each head rotated, and many small experts with a bias for
    their selection.
    """
    for name, only in (("qk_norm_type", "per_layer"), ("scoring_func", "sigmoid"), ("shared_intermediate_size", 0)):
        fields.refuse(name, only)
    config = llama(fields, rope_theta=5e6)
    if (rotary_dim := fields.get("rotary_dim", None, int)) is not None:
        config = replace(config, rotary_dim=rotary_dim)
    experts = ExpertsConfig(
        count=num_experts(fields),
        per_token=fields.get("num_experts_per_tok", 8, int),
        intermediate_size=config.intermediate_size,
        routing=RoutingConfig("sigmoid", normalize_weights=True, has_selection_bias=True, in_float32=True),
    )
    return replace(config, query_key_norm="projection", experts=experts)


def olmoe(fields: ConfigFields) -> ModelConfig:
    """Queries and keys normalized over all heads, and many small experts."""
    config = llama(fields)
    experts = ExpertsConfig(
        count=num_experts(fields),
        per_token=fields.get("num_experts_per_tok", 8, int),
        intermediate_size=config.intermediate_size,
        routing=RoutingConfig(normalize_weights=fields.get("norm_topk_prob", False, bool)),
    )
    clip = fields.positive("clip_qkv", None)
    return replace(config, query_key_norm="projection", query_key_value_clip=clip, experts=experts)


def qwen_experts(fields: ConfigFields, layers: int, *, per_token: int) -> ExpertsConfig:
    """The routed experts; ``per_token`` is a default."""
    every = max(1, fields.get("decoder_sparse_step", 1, int))
    dense = fields.numbers("mlp_only_layers", int)
    return ExpertsConfig(
        count=num_experts(fields),
        per_token=fields.get("num_experts_per_tok", per_token, int),
        intermediate_size=fields.get("moe_intermediate_size", MISSING, int),
        routing=RoutingConfig(normalize_weights=fields.get("norm_topk_prob", False, bool)),
        dense_layers=frozenset({*dense, *(layer for layer in range(layers) if (layer + 1) % every)}),
    )
