"""Qwen3-Next: most layers have a gated delta rule in place of attention."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.llama import listed_layers, llama
from megatron_runtime.model.formats.families.mixture import qwen_experts
from megatron_runtime.model.recurrent_config import GatedDeltaConfig


def qwen3_next(fields: ConfigFields) -> ModelConfig:
    """Gated delta layers, attention with gates that rotates a part of each head, and experts beside a shared one."""
    fields = fields.or_else({"head_dim": 256, "partial_rotary_factor": 0.25, "norm_topk_prob": True})
    fields.refuse("hidden_act", "silu")
    config = llama(fields)
    experts = replace(
        qwen_experts(fields, config.num_layers, per_token=10),
        shared_intermediate_size=fields.get("shared_expert_intermediate_size", 512, int),
        has_shared_expert_gate=True,
    )
    return replace(
        config,
        norm="rms_plus_one",
        query_key_norm="head",
        attention_output_gate=True,
        recurrent=_recurrent(fields, config.num_layers),
        experts=experts,
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
