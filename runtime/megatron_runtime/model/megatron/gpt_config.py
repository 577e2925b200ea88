"""From the configuration of a live GPTModel of Megatron Core to that of a decoder."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.config import Activation, ExpertsConfig, GroupScores, ModelConfig, NormKind, RoutingConfig

ARCHITECTURE = "megatron_gpt"

_NEUTRAL: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "is_hybrid_model": False,
    "heterogeneous_block_specs": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "qk_l2_norm": False,
    "window_size": None,
    "no_rope_freq": None,
    "rotary_interleaved": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "fp8_param": False,
    "fp4_param": False,
    "moe_expert_capacity_factor": None,
    "moe_latent_size": None,
    "moe_input_jitter_eps": None,
    "moe_router_force_load_balancing": False,
}
"""Fields of TransformerConfig, of any release, with the only value that the decoder implements."""
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_TANH_GELUS = ("openai_gelu", "fast_gelu")


def model_config(model: Any, vocab_size: int) -> ModelConfig:
    """The configuration of a GPTModel.

    Args:
        model: The GPTModel, without wrappers.
        vocab_size: Tokens of its tokenizer; Megatron pads the vocabulary beyond them.

    Raises:
        ConfigurationError: The model has a feature that the decoder lacks; the message names the field.
    """
    config = model.config
    _check_neutral(config)
    kind = getattr(model, "position_embedding_type", "learned_absolute")
    if kind not in ("rope", "learned_absolute", "none"):
        raise _unknown("position_embedding_type", kind)
    layers = range(config.num_layers)
    made = ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        rotary_dim=2 * len(model.rotary_pos_emb.inv_freq) if kind == "rope" else None,
        unrotated_layers=frozenset() if kind == "rope" else frozenset(layers),
        learned_positions=model.max_sequence_length if kind == "learned_absolute" else 0,
        max_position_embeddings=model.max_sequence_length,
        rms_norm_eps=config.layernorm_epsilon,
        rope_theta=float(getattr(model, "rotary_base", 10000)),
        tie_word_embeddings=model.share_embeddings_and_output_weights,
        qkv_bias=config.add_bias_linear or config.add_qkv_bias,
        attention_output_bias=config.add_bias_linear,
        mlp_bias=config.add_bias_linear,
        query_key_norm="head" if config.qk_layernorm else "none",
        norm=_norm(config),
        activation=_activation(config),
        gated_feed_forward=config.gated_linear_unit,
        attention_scale=config.softmax_scale,
        experts=None if config.num_moe_experts is None else _experts(config),
    )
    made.check("the Megatron model")
    return made


def _check_neutral(config: Any) -> None:
    for name, only in _NEUTRAL.items():
        value = getattr(config, name, only)
        if value == only or (name in _SIZES and value is None):
            continue
        if name in _SIZES:
            raise ConfigurationError(
                f"{name}={value}: a live model is served in place on one rank; save it as a torch_dist checkpoint, and "
                "load that with load_model and the ranks of join_world",
                field=name,
            )
        raise _unknown(name, value)


def _unknown(field: str, value: object) -> ConfigurationError:
    return ConfigurationError(
        f"{field}={value!r}: the decoder does not implement it; serve a model without it", field=field
    )


def _norm(config: Any) -> NormKind:
    is_zero_centered = getattr(config, "layernorm_zero_centered_gamma", False)
    match config.normalization:
        case "RMSNorm":
            return "rms_plus_one" if is_zero_centered else "rms"
        case "LayerNorm" if not is_zero_centered:
            return "layer"
        case "LayerNorm":
            raise _unknown("layernorm_zero_centered_gamma", True)
        case other:
            raise _unknown("normalization", other)


def _activation(config: Any) -> Activation:
    function = config.activation_func
    if function is functional.silu:
        return "silu"
    if function is functional.gelu:
        # Megatron's fused kernels use the tanh approximation.
        return "gelu_tanh" if getattr(config, "bias_activation_fusion", False) else "gelu"
    if getattr(function, "__name__", "") in _TANH_GELUS:
        return "gelu_tanh"
    raise _unknown("activation_func", getattr(function, "__name__", function))


def _experts(config: Any) -> ExpertsConfig:
    frequency = config.moe_layer_freq
    has_experts = [
        not layer % frequency if isinstance(frequency, int) else bool(frequency[layer])
        for layer in range(config.num_layers)
    ]
    return ExpertsConfig(
        count=config.num_moe_experts,
        per_token=config.moe_router_topk,
        intermediate_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        routing=_routing(config),
        dense_layers=frozenset(layer for layer, has in enumerate(has_experts) if not has),
        shared_intermediate_size=config.moe_shared_expert_intermediate_size or 0,
        has_shared_expert_gate=getattr(config, "moe_shared_expert_gate", False),
    )


def _routing(config: Any) -> RoutingConfig:
    scores = config.moe_router_score_function
    if scores not in ("softmax", "sigmoid"):
        raise _unknown("moe_router_score_function", scores)
    is_softmax = scores == "softmax"
    groups = config.moe_router_num_groups if config.moe_router_group_topk else None
    # A softmax over the selected logits equals the softmax over all logits, normalized to a sum of 1.
    normalizes = not config.moe_router_pre_softmax if is_softmax else config.moe_router_topk > 1
    return RoutingConfig(
        scores=scores,
        normalize_weights=normalizes,
        weight_multiplier=config.moe_router_topk_scaling_factor or 1.0,
        has_selection_bias=config.moe_router_enable_expert_bias,
        groups=groups or 1,
        groups_per_token=config.moe_router_group_topk if groups else 1,
        group_scores=_group_scores(config) if groups else "max",
        weights_inputs=getattr(config, "moe_apply_probs_on_input", False),
        in_float32=config.moe_router_dtype is not None,
    )


def _group_scores(config: Any) -> GroupScores:
    """Megatron sums the highest scores of a group, as many as the token selects in each of its groups."""
    match config.moe_router_topk // config.moe_router_group_topk:
        case 1:
            return "max"
        case 2:
            return "top_2_sum"
    raise _unknown("moe_router_group_topk", config.moe_router_group_topk)
