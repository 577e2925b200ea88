"""The text models of Llama 4."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ExpertsConfig, ModelConfig, QueryTemperature, RoutingConfig
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.families.expert_fields import num_experts
from megatron_runtime.model.formats.families.llama import listed_windows, llama, unrotated_layers


def llama4(fields: ConfigFields) -> ModelConfig:
    """The text model of a multimodal Llama 4; the vision model is ignored."""
    config = llama4_text(fields.within("text_config").or_else({"model_type": "llama4_text"}))
    tied = fields.get("tie_word_embeddings", config.tie_word_embeddings, bool)
    return replace(config, architecture="llama4", tie_word_embeddings=tied)


def llama4_text(fields: ConfigFields) -> ModelConfig:
    """Chunks of attention in the layers with a rotation, longer attention in the others, and a shared expert."""
    config = llama(fields.or_else({"rms_norm_eps": 1e-5}), rope_theta=5e5)
    unrotated = unrotated_layers(fields, config.num_layers)
    return replace(
        config,
        intermediate_size=fields.get("intermediate_size_mlp", 16384, int),
        mlp_bias=False,
        rope_interleave=True,
        unrotated_layers=unrotated,
        chunked_windows=True,
        layer_windows=_chunks(fields, config.num_layers, unrotated),
        query_key_norm="unweighted" if fields.switch("use_qk_norm", True) else "none",
        query_temperature=_temperature(fields),
        experts=_experts(fields, config.num_layers, config.intermediate_size),
    )


def _chunks(fields: ConfigFields, layers: int, unrotated: frozenset[int]) -> tuple[int | None, ...]:
    size = fields.get("attention_chunk_size", 8192, int)
    by_rotation = tuple(None if layer in unrotated else size for layer in range(layers))
    return listed_windows(fields, size, "chunked_attention") or by_rotation


def _temperature(fields: ConfigFields) -> QueryTemperature | None:
    if not fields.switch("attn_temperature_tuning", True):
        return None
    strength, interval = fields.get("attn_scale", 0.1, float), int(fields.positive("floor_scale", 8192.0))
    return QueryTemperature(strength, interval, offset=1, only_unrotated=True)


def _experts(fields: ConfigFields, layers: int, intermediate_size: int) -> ExpertsConfig | None:
    """One selected and one shared expert in every layer, every second one, or the listed ones."""
    every = max(1, fields.get("interleave_moe_layer_step", 1, int))
    listed = fields.get("moe_layers", None, list)
    sparse = range(every - 1, layers, every) if listed is None else fields.numbers("moe_layers", int)
    dense = frozenset(range(layers)) - frozenset(sparse)
    if len(dense) == layers:
        return None
    return ExpertsConfig(
        count=num_experts(fields),
        per_token=fields.get("num_experts_per_tok", 1, int),
        intermediate_size=fields.get("intermediate_size", MISSING, int),
        routing=RoutingConfig("sigmoid", weights_inputs=True),
        dense_layers=dense,
        shared_intermediate_size=intermediate_size,
    )
