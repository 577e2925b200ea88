"""GLM-4 and GLM-4.5."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.expert_fields import deepseek_v3_experts
from megatron_runtime.model.formats.families.llama import llama


def glm4_moe(fields: ConfigFields) -> ModelConfig:
    """Llama that rotates half of each head, with DeepSeek-V3's experts after the first layers."""
    config = llama(fields.or_else({"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}))
    return replace(
        config,
        attention_output_bias=False,
        query_key_norm="head" if fields.get("use_qk_norm", False, bool) else "none",
        experts=deepseek_v3_experts(fields, config.num_layers),
        prediction_layers=fields.get("num_nextn_predict_layers", 0, int),
    )


def glm4(fields: ConfigFields) -> ModelConfig:
    """Llama that rotates adjacent channels of half of each head, with norms of inputs and outputs."""
    config = llama(fields.or_else({"partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-7}))
    return replace(config, attention_output_bias=False, norm_placement="around", rope_interleave=True)
