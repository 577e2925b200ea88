"""Nemotron-H: each layer is attention, Mamba-2, a feed-forward network or experts alone."""

from __future__ import annotations

import math
from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ExpertsConfig, ModelConfig, check_num_layers
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.families.expert_fields import deepseek_v3_routing
from megatron_runtime.model.recurrent_config import Mamba2Config

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""By the letters of ``hybrid_override_pattern``."""
_EARLIER = {"mamba": "linear_attention", "attention": "full_attention"}
"""Names of ``layers_block_type`` in earlier versions of transformers."""
_REFUSED = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "attention_bias": False,
    "mamba_proj_bias": False,
    "sliding_window": None,
    "residual_in_fp32": False,
    "tie_word_embeddings": False,
    "moe_latent_size": None,
}


def nemotron_h(fields: ConfigFields) -> ModelConfig:
    """Attention without positions, squared ReLU without gates, and RMS norms with one rounding.

    The limits of time steps are those of ``time_step_limit``, as in the training; transformers limits the steps of
    prompts, but not those of single tokens, to ``time_step_min`` and more.
    """
    for name, supported in _REFUSED.items():
        fields.refuse(name, supported)
    kinds = _layer_kinds(fields)
    heads = fields.get("num_attention_heads", 32, int)
    fed = _layers_of(kinds, "mlp") | _layers_of(kinds, "moe")
    return ModelConfig(
        architecture=fields.get("model_type", MISSING, str),
        vocab_size=fields.get("vocab_size", MISSING, int),
        hidden_size=fields.get("hidden_size", MISSING, int),
        intermediate_size=fields.get("intermediate_size", MISSING, int),
        num_layers=check_num_layers(str(fields.path), len(kinds)),
        num_attention_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", heads, int),
        head_dim=fields.get("head_dim", fields.get("attention_head_dim", 128, int), int),
        max_position_embeddings=fields.get("max_position_embeddings", 4096, int),
        rms_norm_eps=fields.get("layer_norm_epsilon", 1e-5, float),
        rope_theta=10000.0,
        unrotated_layers=frozenset(range(len(kinds))),
        mlp_bias=fields.get("mlp_bias", False, bool),
        norm="rms_in_float32",
        activation="relu_squared",
        gated_feed_forward=False,
        experts=_experts(fields, kinds) if "moe" in kinds else None,
        recurrent=_recurrent(fields, kinds),
        feed_forward_layers=fed,
    )


def _layer_kinds(fields: ConfigFields) -> list[str]:
    listed = fields.get("layers_block_type", [], list)
    if listed:
        kinds = [_EARLIER.get(kind, kind) if isinstance(kind, str) else str(kind) for kind in listed]
        if unknown := [kind for kind in kinds if kind not in _KINDS.values()]:
            known = ", ".join([*_KINDS.values(), *_EARLIER])
            raise CheckpointError(f"{fields.path}: layers_block_type has {unknown[0]!r}, expected one of {known}")
        return kinds
    pattern = fields.get("hybrid_override_pattern", MISSING, str)
    if unknown := [letter for letter in pattern if letter not in _KINDS]:
        raise CheckpointError(
            f"{fields.path}: hybrid_override_pattern has {unknown[0]!r}, expected letters among {' '.join(_KINDS)}"
        )
    if (count := fields.get("num_hidden_layers", len(pattern), int)) != len(pattern):
        raise CheckpointError(
            f"{fields.path}: hybrid_override_pattern has {len(pattern)} letters for {count} layers. "
            "Fetch the file again"
        )
    return [_KINDS[letter] for letter in pattern]


def _layers_of(kinds: list[str], kind: str) -> frozenset[int]:
    return frozenset(layer for layer, each in enumerate(kinds) if each == kind)


def _recurrent(fields: ConfigFields, kinds: list[str]) -> Mamba2Config:
    return Mamba2Config(
        layers=_layers_of(kinds, "linear_attention"),
        key_heads=_either(fields, "mamba_n_groups", "n_groups", 8, int),
        value_heads=fields.get("mamba_num_heads", 128, int),
        key_dim=fields.get("ssm_state_size", 128, int),
        value_dim=fields.get("mamba_head_dim", 64, int),
        taps=_either(fields, "mamba_d_conv", "conv_kernel", 4, int),
        has_bias=fields.get("use_bias", False, bool),
        has_convolution_bias=_either(fields, "mamba_conv_bias", "use_conv_bias", True, bool),
        step_limits=_step_limits(fields),
    )


def _either(fields: ConfigFields, earlier: str, name: str, default: Any, kind: type) -> Any:
    """A field that earlier versions of transformers name differently."""
    return fields.get(earlier, fields.get(name, default, kind), kind)


def _step_limits(fields: ConfigFields) -> tuple[float, float]:
    listed = _either(fields, "mamba_dt_limit", "time_step_limit", [0.0, math.inf], list)
    # JSON has no infinity, so transformers writes an object.
    try:
        shortest, longest = (float(each["__float__"] if isinstance(each, dict) else each) for each in listed)
    except (TypeError, ValueError, KeyError):
        raise CheckpointError(
            f"{fields.path}: time_step_limit is {listed}, expected two numbers. Fetch the file again"
        ) from None
    return shortest, longest


def _experts(fields: ConfigFields, kinds: list[str]) -> ExpertsConfig:
    """The experts of DeepSeek-V3 without gates."""
    fields.refuse("mlp_bias", False)  # experts would have none, but the shared one
    return ExpertsConfig(
        count=fields.get("n_routed_experts", MISSING, int),
        per_token=fields.get("num_experts_per_tok", 2, int),
        intermediate_size=fields.get("moe_intermediate_size", MISSING, int),
        routing=deepseek_v3_routing(fields, multiplier=1.0, groups=1),
        dense_layers=frozenset(range(len(kinds))) - _layers_of(kinds, "moe"),
        shared_intermediate_size=fields.get("moe_shared_expert_intermediate_size", MISSING, int),
    )
