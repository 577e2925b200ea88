"""All model families: from the fields of a ``config.json`` to the configuration of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families import deepseek, gemma, glm, gpt2, llama, mixture, olmo

FAMILIES: Mapping[str, Callable[[ConfigFields], ModelConfig]] = {
    "llama": llama.llama,
    "mistral": llama.mistral,
    "qwen2": llama.qwen2,
    "qwen3": llama.qwen3,
    "smollm3": llama.smollm3,
    "phi3": llama.phi3,
    "granite": llama.granite,
    "olmo2": olmo.olmo2,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gemma3": gemma.gemma3_with_vision,
    "mixtral": mixture.mixtral,
    "qwen2_moe": mixture.qwen2_moe,
    "qwen3_moe": mixture.qwen3_moe,
    "olmoe": mixture.olmoe,
    "glm4_moe": glm.glm4_moe,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "kimi_k2": deepseek.deepseek_v3,
    "gpt2": gpt2.gpt2,
}
"""By ``model_type``."""
