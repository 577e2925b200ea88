"""Llama and the families that differ from it in a few fields."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import Activation, ModelConfig, alternating_windows, check_num_layers
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.rope_fields import rope_settings

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def llama(fields: ConfigFields, *, tied: bool = False, rope_theta: float = 10000.0) -> ModelConfig:
    """Fields of all these families; ``tied`` and ``rope_theta`` are defaults."""
    heads, hidden = fields.get("num_attention_heads", MISSING, int), fields.get("hidden_size", MISSING, int)
    head_dim = fields.get("head_dim", hidden // max(heads, 1), int)
    attention_bias = fields.get("attention_bias", False, bool)
    return ModelConfig(
        architecture=fields.get("model_type", MISSING, str),
        vocab_size=fields.get("vocab_size", MISSING, int),
        hidden_size=hidden,
        intermediate_size=fields.get("intermediate_size", MISSING, int),
        num_layers=check_num_layers(str(fields.path), fields.get("num_hidden_layers", MISSING, int)),
        num_attention_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", heads, int),
        head_dim=head_dim,
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6, float),
        tie_word_embeddings=fields.get("tie_word_embeddings", tied, bool),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.get("mlp_bias", False, bool),
        activation=activation(fields, "hidden_act", "silu"),
        **rope_settings(fields, head_dim, rope_theta),
    )


def mistral(fields: ConfigFields) -> ModelConfig:
    """Llama with an attention window in every layer."""
    config = llama(fields)
    if window := fields.get("sliding_window", None, int):
        return replace(config, layer_windows=listed_windows(fields, window) or (window,) * config.num_layers)
    return config


def qwen2(fields: ConfigFields) -> ModelConfig:
    """Biases only on queries, keys and values; optionally a window in the upper layers."""
    config = llama(fields)
    return replace(
        config, qkv_bias=True, attention_output_bias=False, layer_windows=_upper_windows(fields, config.num_layers)
    )


def qwen3(fields: ConfigFields) -> ModelConfig:
    """Queries and keys normalized per head."""
    config = llama(fields)
    return replace(config, query_key_norm="head", layer_windows=_upper_windows(fields, config.num_layers))


def smollm3(fields: ConfigFields) -> ModelConfig:
    """Every fourth layer, or each layer with a 0 in the list, has no positions (Yang et al., NoPE)."""
    config = llama(fields, tied=True, rope_theta=2e6)
    window = fields.get("sliding_window", None, int) if fields.get("use_sliding_window", False, bool) else None
    return replace(
        config,
        unrotated_layers=unrotated_layers(fields, config.num_layers),
        layer_windows=listed_windows(fields, window) if window else (),
    )


def unrotated_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """The layers with a 0 in the list, or every fourth one without a list."""
    rotated = fields.numbers("no_rope_layers", int)
    if rotated and len(rotated) != layers:
        raise CheckpointError(
            f"{fields.path}: no_rope_layers has {len(rotated)} entries, expected {layers}. Fetch the file again"
        )
    every = max(1, fields.get("no_rope_layer_interval", 4, int))
    rotated = rotated or tuple((layer + 1) % every for layer in range(layers))
    return frozenset(layer for layer, turns in enumerate(rotated) if not turns)


def seed_oss(fields: ConfigFields) -> ModelConfig:
    """Llama with separate settings for the biases of attention's inputs and output."""
    config = llama(fields.or_else({"attention_bias": True}))
    return replace(config, attention_output_bias=fields.get("attention_out_bias", False, bool))


def starcoder2(fields: ConfigFields) -> ModelConfig:
    """LayerNorm, biases everywhere, no gates, and optionally a window in every layer."""
    config = mistral(fields.or_else({"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}))
    bias = fields.get("use_bias", True, bool)
    return replace(
        config,
        rms_norm_eps=fields.get("norm_epsilon", 1e-5, float),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
        norm="layer",
        gated_feed_forward=False,
    )


def phi3(fields: ConfigFields) -> ModelConfig:
    """Llama with a window, and with fused matrices in the file."""
    return mistral(fields)


def granite(fields: ConfigFields) -> ModelConfig:
    """Factors for embedding, attention, residual path and logits."""
    return replace(
        llama(fields),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        attention_scale=fields.positive("attention_multiplier", 1.0),
        logit_divisor=fields.positive("logits_scaling", 1.0),
    )


def activation(fields: ConfigFields, name: str, default: str) -> Activation:
    """The activation in the field ``name``. Raises CheckpointError for unknown ones."""
    found = fields.get(name, default, str)
    if found not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise CheckpointError(f"{fields.path}: {name} is {found!r}, the known ones are {known}")
    return _ACTIVATIONS[found]


def listed_windows(fields: ConfigFields, window: int, limited: str = "sliding_attention") -> tuple[int | None, ...]:
    """The window of each layer by ``layer_types``; empty without that list. Layers of type ``limited`` have one."""
    return tuple(window if is_limited else None for is_limited in listed_layers(fields, limited))


def listed_layers(fields: ConfigFields, kind: str) -> list[bool]:
    """Whether each layer in ``layer_types`` is of this kind, and not of full attention; empty without that list."""
    kinds = fields.get("layer_types", [], list)
    if unknown := [each for each in kinds if each not in (kind, "full_attention")]:
        raise CheckpointError(f"{fields.path}: layer_types holds {unknown[0]!r}, expected {kind} or full_attention")
    return [each == kind for each in kinds]


def windows_by_pattern(fields: ConfigFields, window: int, pattern: int, layers: int) -> tuple[int | None, ...]:
    """The window of each layer by ``layer_types``; without that list, all layers but every ``pattern``-th have it."""
    return listed_windows(fields, window) or alternating_windows(window, max(pattern, 1), layers)


def _upper_windows(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    window = fields.get("sliding_window", None, int)
    if window is None:
        return ()
    if listed := listed_windows(fields, window):
        return listed
    if not fields.get("use_sliding_window", False, bool):
        return ()
    first = fields.get("max_window_layers", 28, int)
    return tuple(window if layer >= first else None for layer in range(layers))
