"""The families that llama.cpp writes to GGUF files, as changes of a configuration that was read as Llama's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from gguf.constants import ExpertGatingFuncType

from megatron_runtime.model.config import (
    ClampedGate,
    ModelConfig,
    QueryTemperature,
    RoutingConfig,
    alternating_windows,
    layers_without_window,
)
from megatron_runtime.model.formats import gguf_hybrids
from megatron_runtime.model.formats.gguf_metadata import GgufMetadata
from megatron_runtime.model.rope_scaling import RopeScaling


def _as_it_is(config: ModelConfig, _: GgufMetadata) -> ModelConfig:
    return config


def _gemma(config: ModelConfig, _: GgufMetadata) -> ModelConfig:
    return replace(
        config,
        norm="rms_plus_one",
        activation="gelu_tanh",
        embedding_multiplier=math.sqrt(max(config.hidden_size, 1)),
    )


def _gemma2(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    return _windows_and_caps(_gemma(config, values), values, pattern=2, narrow_scores=46)


def _gemma3(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    config = _windows_and_caps(_gemma(config, values), values, pattern=6, narrow_scores=62)
    return replace(config, local_rope_theta=float(values.get("rope.freq_base_swa", 10000.0)))


def _windows_and_caps(config: ModelConfig, values: GgufMetadata, *, pattern: int, narrow_scores: int) -> ModelConfig:
    """Norms of inputs and outputs, a window in all layers but every ``pattern``-th, and soft caps.

    The file does not contain the scale of the scores. As in llama.cpp, the largest model of each generation, detected
    by its ``narrow_scores`` layers, has the scale of heads that share the hidden size; the others have that of their
    heads.
    """
    pattern = max(int(values.get("attention.sliding_window_pattern", pattern)), 1)
    window = int(values.get("attention.sliding_window", 0))
    heads = max(config.num_attention_heads, 1)
    scaled_by = config.hidden_size // heads if config.num_layers == narrow_scores else config.head_dim
    return replace(
        config,
        norm_placement="around",
        layer_windows=alternating_windows(window, pattern, config.num_layers) if window > 0 else (),
        attention_scale=max(scaled_by, 1) ** -0.5,
        attention_soft_cap=values.soft_cap("attn_logit_softcapping"),
        logit_soft_cap=values.soft_cap("final_logit_softcapping"),
    )


def _ministral3(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    strength = float(values.get("attention.temperature_scale", 0.0))
    if not strength:
        return config
    original = config.rope_scaling.original_max_position_embeddings or config.max_position_embeddings
    interval = int(values.get("attention.temperature_length", 0)) or original
    return replace(config, query_temperature=QueryTemperature(strength, interval))


def _starcoder2(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    window = int(values.get("attention.sliding_window", 0))
    return replace(
        config,
        norm="layer",
        activation="gelu_tanh",
        gated_feed_forward=False,
        layer_windows=(window,) * config.num_layers if window > 0 else (),
    )


def _olmo2(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    """With windows OLMo 3, whose layers with one have no rotary scaling."""
    config = replace(config, norm_placement="after", query_key_norm="projection")
    window = int(values.get("attention.sliding_window", 0))
    if window <= 0:
        return config
    listed = tuple(window if limited else None for limited in values.flags("attention.sliding_window_pattern"))
    return replace(
        config,
        architecture="olmo3",
        layer_windows=listed or alternating_windows(window, 4, config.num_layers),
        local_rope_theta=config.rope_theta,
    )


def _glm4(config: ModelConfig, _: GgufMetadata) -> ModelConfig:
    return replace(config, norm_placement="around", rope_interleave=True)


def _command_r(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    return replace(
        config,
        norm="layer_without_bias",
        parallel_feed_forward=True,
        rope_interleave=True,
        query_key_norm="each_head" if values.has_tensor("blk.0.attn_q_norm.weight") else "none",
        logit_divisor=1.0 / (float(values.get("logit_scale", 1.0)) or 1.0),
    )


def _cohere2(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    windows = alternating_windows(values.number("attention.sliding_window"), 4, config.num_layers)
    return replace(
        _command_r(config, values),
        layer_windows=windows,
        unrotated_layers=layers_without_window(windows),
    )


def _minimax_m2(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    values.require("expert_gating_func", ExpertGatingFuncType.SIGMOID)
    routing = RoutingConfig("sigmoid", normalize_weights=True, has_selection_bias=True, in_float32=True)
    return replace(_routed(config, routing), query_key_norm="projection")


def _qwen2_moe(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    normalizes = bool(values.get("expert_weights_norm", False))
    return _with_shared_expert(
        _routed(config, RoutingConfig(normalize_weights=normalizes)),
        values.number("expert_shared_feed_forward_length"),
        has_gate=True,
    )


def _glm4_moe(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    """Files count the layers that predict further tokens as layers."""
    values.require("expert_gating_func", ExpertGatingFuncType.SIGMOID)
    routing = RoutingConfig(
        "sigmoid",
        normalize_weights=bool(values.get("expert_weights_norm", True)),
        weight_multiplier=float(values.get("expert_weights_scale", 1.0)),
        has_selection_bias=True,
        in_float32=True,
    )
    further = int(values.get("nextn_predict_layers", 0))
    config = replace(_routed(config, routing), num_layers=config.num_layers - further, prediction_layers=further)
    if (experts := config.experts) is None:
        return config
    dense = range(min(int(values.get("leading_dense_block_count", 0)), config.num_layers))
    config = replace(config, experts=replace(experts, dense_layers=frozenset(dense)))
    return _with_shared_expert(config, int(values.get("expert_shared_count", 0)) * experts.intermediate_size)


def _phi3(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    """With LongRoPE if the file has its factors."""
    window = int(values.get("attention.sliding_window", 0))
    config = replace(config, layer_windows=(window,) * config.num_layers if window > 0 else ())
    short, long = (values.vector(f"rope_factors_{name}.weight") for name in ("short", "long"))
    if not short and not long:
        return config
    scaling = RopeScaling(
        "longrope",
        original_max_position_embeddings=values.number("rope.scaling.original_context_length"),
        short_factors=short,
        long_factors=long,
        magnitude=float(values.get("rope.scaling.attn_factor", 1.0)),
    )
    return replace(config, rope_scaling=scaling)


def _llama4(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    """As in llama.cpp, the chunks, the layers without rotation and the temperature are constants, and the model with
    128 experts has no norms of queries and keys.
    """
    layers, every = config.num_layers, max(int(values.get("interleave_moe_layer_step", 1)), 1)
    chunk = int(values.get("attention.sliding_window", 8192))
    windows = alternating_windows(chunk, 4, layers)
    config = _routed(config, RoutingConfig("sigmoid", weights_inputs=True))
    if (experts := config.experts) is not None:
        dense = frozenset(range(layers)) - frozenset(range(every - 1, layers, every))
        experts = replace(experts, dense_layers=dense, shared_intermediate_size=experts.intermediate_size)
    return replace(
        config,
        rope_interleave=True,
        unrotated_layers=layers_without_window(windows),
        chunked_windows=True,
        layer_windows=windows if chunk > 0 else (),
        query_key_norm="none" if experts is not None and experts.count == 128 else "unweighted",
        query_temperature=QueryTemperature(0.1, 8192, offset=1, only_unrotated=True),
        experts=experts,
    )


def _gpt_oss(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    """The activation is a constant, as in llama.cpp."""
    window = values.number("attention.sliding_window")
    scaling = replace(config.rope_scaling, whole_channels=False)
    return replace(
        _routed(config, RoutingConfig(normalize_weights=True, has_bias=True)),
        rope_scaling=scaling if scaling.kind == "yarn" else config.rope_scaling,
        mlp_bias=True,
        attention_sinks=True,
        layer_windows=alternating_windows(window, 2, config.num_layers),
        clamped_gate=ClampedGate(1.702, 7.0),
    )


def _routed(config: ModelConfig, routing: RoutingConfig) -> ModelConfig:
    """With ``routing`` of the experts."""
    return config if config.experts is None else replace(config, experts=replace(config.experts, routing=routing))


def _with_shared_expert(config: ModelConfig, size: int, *, has_gate: bool = False) -> ModelConfig:
    if config.experts is None:
        return config
    experts = replace(config.experts, shared_intermediate_size=size, has_shared_expert_gate=has_gate)
    return replace(config, experts=experts)


HUGGING_FACE_NAMES = {
    "qwen2moe": "qwen2_moe",
    "glm4moe": "glm4_moe",
    "mistral3": "ministral3",
    "command-r": "cohere",
    "minimax-m2": "minimax_m2",
    "llama4": "llama4_text",
    "gpt-oss": "gpt_oss",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "nemotron_h_moe": "nemotron_h",
}
"""The architectures whose names of tensors are those of another name in Hugging Face's files."""
WITH_SHARED_EXPERTS = ("glm4moe", "nemotron_h_moe")
"""The architectures whose files count shared experts."""
WITH_SIZES_OF_LAYERS = ("nemotron_h", "nemotron_h_moe")
"""The architectures with a list of key heads and feed-forward lengths, which are 0 in layers without them."""
WITH_EXPERTS_ALONE = ("qwen35moe",)
"""The architectures whose files need no size of a dense network."""
PARTLY_ROTATED = (
    *("glm4", "glm4moe", "phi3", "cohere2", "minimax-m2", "qwen3next", "qwen35", "qwen35moe"),
    *("nemotron_h", "nemotron_h_moe"),
)
"""The architectures that may rotate a part of each head, or none."""
GGUF_FAMILIES: dict[str, Callable[[ModelConfig, GgufMetadata], ModelConfig]] = {
    "llama": _as_it_is,
    "mistral": _as_it_is,
    "mistral3": _ministral3,
    "seed_oss": _as_it_is,
    "starcoder2": _starcoder2,
    "olmo2": _olmo2,
    "glm4": _glm4,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "phi3": _phi3,
    "qwen2moe": _qwen2_moe,
    "glm4moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
    "llama4": _llama4,
    "gpt-oss": _gpt_oss,
    "qwen3next": gguf_hybrids.qwen3_next,
    "qwen35": gguf_hybrids.qwen3_next,
    "qwen35moe": gguf_hybrids.qwen3_next,
    "nemotron_h": gguf_hybrids.nemotron_h,
    "nemotron_h_moe": gguf_hybrids.nemotron_h,
    "qwen2": _as_it_is,
    "qwen3": _as_it_is,
    "qwen3moe": _as_it_is,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""By ``general.architecture``: the change of a configuration that was read as Llama's."""
