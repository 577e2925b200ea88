"""Ministral 3, and the text models of multimodal models of Mistral: Mistral Small 3.1 and later, Ministral 3."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ModelConfig, QueryTemperature, refuse_architecture
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.families.llama import mistral


def ministral3(fields: ConfigFields) -> ModelConfig:
    """Mistral with queries that are multiplied by a factor beyond the original length."""
    config = mistral(fields.or_else({"rms_norm_eps": 1e-5}))
    rope = fields.within("rope_parameters", "rope_scaling")
    if not (strength := rope.get("llama_4_scaling_beta", 0.0, float)):
        return config
    interval = int(rope.positive("original_max_position_embeddings", MISSING))
    return replace(config, query_temperature=QueryTemperature(strength, interval))


_TEXT_MODELS = {"mistral": mistral, "ministral": mistral, "ministral3": ministral3}


def mistral3(fields: ConfigFields) -> ModelConfig:
    """The text model of a multimodal model; the vision model is ignored."""
    text = fields.within("text_config").or_else({"model_type": "mistral"})
    architecture = text.get("model_type", MISSING, str)
    if architecture not in _TEXT_MODELS:
        raise refuse_architecture(f"{fields.path}: text_config", architecture, _TEXT_MODELS)
    config = _TEXT_MODELS[architecture](text)
    tied = fields.get("tie_word_embeddings", config.tie_word_embeddings, bool)
    return replace(config, architecture="mistral3", tie_word_embeddings=tied)
