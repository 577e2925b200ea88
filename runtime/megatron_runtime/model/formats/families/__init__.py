"""All model families: from the fields of a ``config.json`` to the configuration of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families import (
    cohere,
    deepseek,
    gemma,
    glm,
    gpt2,
    gpt_oss,
    llama,
    llama4,
    mistral,
    mixture,
    nemotron,
    olmo,
    qwen3_next,
)

FAMILIES: Mapping[str, Callable[[ConfigFields], ModelConfig]] = {
    "llama": llama.llama,
    "mistral": llama.mistral,
    "ministral": llama.mistral,
    "ministral3": mistral.ministral3,
    "mistral3": mistral.mistral3,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
    "smollm3": llama.smollm3,
    "phi3": llama.phi3,
    "granite": llama.granite,
    "seed_oss": llama.seed_oss,
    "starcoder2": llama.starcoder2,
    "olmo2": olmo.olmo2,
    "olmo3": olmo.olmo3,
    "cohere": cohere.cohere,
    "cohere2": cohere.cohere2,
    "glm4": glm.glm4,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gemma3": gemma.gemma3_with_vision,
    "mixtral": mixture.mixtral,
    "qwen2_moe": mixture.qwen2_moe,
    "qwen3_moe": mixture.qwen3_moe,
    "qwen3_next": qwen3_next.qwen3_next,
    "qwen3_5": qwen3_next.qwen3_5,
    "qwen3_5_text": qwen3_next.qwen3_5_text,
    "qwen3_5_moe": qwen3_next.qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_next.qwen3_5_moe_text,
    "nemotron_h": nemotron.nemotron_h,
    "olmoe": mixture.olmoe,
    "minimax_m2": mixture.minimax_m2,
    "llama4_text": llama4.llama4_text,
    "llama4": llama4.llama4,
    "gpt_oss": gpt_oss.gpt_oss,
    "glm4_moe": glm.glm4_moe,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "kimi_k2": deepseek.deepseek_v3,
    "gpt2": gpt2.gpt2,
}
"""By ``model_type``."""
