"""Families with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ExpertsConfig, ModelConfig, RoutingConfig
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.families.expert_fields import num_experts
from megatron_runtime.model.formats.families.llama import llama, mistral, qwen3


def mixtral(fields: ConfigFields) -> ModelConfig:
    """Mistral with experts as wide as its feed-forward networks would be."""
    config = mistral(fields)
    experts = ExpertsConfig(
        count=fields.get("num_local_experts", MISSING, int),
        per_token=fields.get("num_experts_per_tok", 2, int),
        intermediate_size=config.intermediate_size,
        routing=RoutingConfig(normalize_weights=True),
    )
    return replace(config, experts=experts)


def qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Qwen3 with narrow experts in the layers that the file names."""
    config = qwen3(fields)
    every = max(1, fields.get("decoder_sparse_step", 1, int))
    dense = fields.numbers("mlp_only_layers", int)
    experts = ExpertsConfig(
        count=num_experts(fields),
        per_token=fields.get("num_experts_per_tok", 8, int),
        intermediate_size=fields.get("moe_intermediate_size", MISSING, int),
        routing=RoutingConfig(normalize_weights=fields.get("norm_topk_prob", False, bool)),
        dense_layers=frozenset({*dense, *(layer for layer in range(config.num_layers) if (layer + 1) % every)}),
    )
    return replace(config, experts=experts)


def olmoe(fields: ConfigFields) -> ModelConfig:
    """Queries and keys normalized as a whole, and many small experts."""
    config = llama(fields)
    experts = ExpertsConfig(
        count=num_experts(fields),
        per_token=fields.get("num_experts_per_tok", 8, int),
        intermediate_size=config.intermediate_size,
        routing=RoutingConfig(normalize_weights=fields.get("norm_topk_prob", False, bool)),
    )
    clip = fields.positive("clip_qkv", None)
    return replace(config, query_key_norm="projection", query_key_value_clip=clip, experts=experts)
