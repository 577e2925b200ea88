"""DeepSeek-V2 and DeepSeek-V3; Kimi K2 has the architecture of the latter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_runtime.model.config import ExpertsConfig, LatentAttentionConfig, ModelConfig
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.families.expert_fields import deepseek_v2_experts, deepseek_v3_experts
from megatron_runtime.model.formats.families.llama import llama
from megatron_runtime.model.formats.rope_fields import yarn_magnitude


def deepseek_v2(fields: ConfigFields) -> ModelConfig:
    """Llama with multi-head latent attention, and experts after the first layers."""
    config = _with_latent_attention(llama(fields), fields)
    return replace(config, experts=_experts(fields, config.num_layers, deepseek_v2_experts))


def deepseek_v3(fields: ConfigFields) -> ModelConfig:
    """The same with other experts. Files may have further layers, which predict more than one token."""
    config = _with_latent_attention(llama(fields), fields)
    return replace(
        config,
        experts=_experts(fields, config.num_layers, deepseek_v3_experts),
        prediction_layers=fields.get("num_nextn_predict_layers", 0, int),
    )


def _with_latent_attention(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    latent = LatentAttentionConfig(
        kv_lora_rank=fields.get("kv_lora_rank", MISSING, int),
        qk_nope_head_dim=fields.get("qk_nope_head_dim", MISSING, int),
        qk_rope_head_dim=fields.get("qk_rope_head_dim", MISSING, int),
        v_head_dim=fields.get("v_head_dim", MISSING, int),
        q_lora_rank=fields.get("q_lora_rank", None, int),
        rope_interleave=fields.get("rope_interleave", True, bool),
    )
    head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    return replace(
        config,
        num_kv_heads=config.num_attention_heads,
        head_dim=head_dim,
        rotary_dim=latent.qk_rope_head_dim,
        attention_scale=_attention_scale(fields, config, head_dim),
        latent_attention=latent,
    )


def _attention_scale(fields: ConfigFields, config: ModelConfig, head_dim: int) -> float | None:
    """These models have a magnitude of all channels in addition to that of the rotated ones."""
    scale = fields.within("rope_parameters", "rope_scaling").get("mscale_all_dim", 0.0, float)
    if config.rope_scaling.kind == "default" or not scale:
        return None
    return float(yarn_magnitude(config.rope_scaling.factor, scale) ** 2 * max(head_dim, 1) ** -0.5)


def _experts(
    fields: ConfigFields, layers: int, read: Callable[[ConfigFields, int], ExpertsConfig]
) -> ExpertsConfig | None:
    """The experts that ``read`` finds in the fields; None if no layer has experts."""
    if fields.get("n_routed_experts", None, int) is None:
        return None
    experts = read(fields, layers)
    return experts if len(experts.dense_layers) < layers else None
