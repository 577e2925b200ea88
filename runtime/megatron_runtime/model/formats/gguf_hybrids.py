"""The families with recurrent layers that llama.cpp writes to GGUF files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gguf.constants import ExpertGatingFuncType

from megatron_runtime.model.config import ExpertsConfig, ModelConfig, RoutingConfig
from megatron_runtime.model.formats.gguf_metadata import GgufMetadata
from megatron_runtime.model.recurrent_config import GatedDeltaConfig, Mamba2Config


def qwen3_next(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    """Gated delta layers, attention with gates, and experts beside a shared one; also Qwen3.5, dense or with experts.

    Files may count the layers that predict further tokens as layers. ``rope.dimension_sections`` of Qwen3.5 is not
    read: it divides the rotated channels among the three positions of a token in an image, which are one in a text.
    """
    values.require("expert_gating_func", ExpertGatingFuncType.SOFTMAX)
    config = _without_further_layers(config, values)
    layers = range(config.num_layers)
    listed, every = values.flags("attention.recurrent_layers"), max(int(values.get("full_attention_interval", 4)), 1)
    if listed and len(listed) not in (config.num_layers, config.num_layers + config.prediction_layers):
        raise values.error("attention.recurrent_layers", f"a list of {len(listed)}", f"one for {config.num_layers}")
    recurrent = frozenset(layer for layer in layers if (listed[layer] if listed else (layer + 1) % every))
    attention = next((layer for layer in layers if layer not in recurrent), 0)
    experts = config.experts
    if experts is not None:
        shared = values.number("expert_shared_feed_forward_length")
        experts = replace(experts, shared_intermediate_size=shared, has_shared_expert_gate=True)
    return replace(
        config,
        norm="rms_plus_one",
        query_key_norm="head",
        attention_output_gate=True,
        qkv_bias=values.has_tensor(f"blk.{attention}.attn_q.bias"),
        attention_output_bias=values.has_tensor(f"blk.{attention}.attn_output.bias"),
        recurrent=GatedDeltaConfig(layers=recurrent, **_recurrent_sizes(values)),
        experts=experts,
    )


def nemotron_h(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    """Each layer is attention, Mamba-2, or a feed-forward network or experts alone.

    As in llama.cpp, a layer with key heads has attention, one with a feed-forward length is a network or, in
    ``nemotron_h_moe``, experts, and all others are Mamba-2. Files have neither limits of time steps nor the longest
    sequence: the length of the context is that of the converter, 1,048,576 tokens. The converter permutes the rows of
    queries and keys for a rotation, which these models don't have; their products are the same.
    """
    values.require("attention.scale", 0.0)
    values.require("moe_latent_size", 0)
    values.require("expert_gating_func", ExpertGatingFuncType.SIGMOID)
    count = config.num_layers
    heads, lengths = (values.numbers(key, count) for key in ("attention.head_count_kv", "feed_forward_length"))
    config = _without_further_layers(config, values)
    layers = range(config.num_layers)
    if both := [layer for layer in layers if heads[layer] and lengths[layer]]:
        problem = f"{lengths[both[0]]} in layer {both[0]}, which has attention"
        raise values.error("feed_forward_length", problem, "0 where attention.head_count_kv is not")
    fed = frozenset(layer for layer in layers if lengths[layer])
    recurrent = frozenset(layer for layer in layers if not heads[layer] and not lengths[layer])
    attention = next((layer for layer in layers if heads[layer]), 0)
    mamba, network = min(recurrent, default=0), min(fed, default=0)
    return replace(
        config,
        norm="rms_in_float32",
        activation="relu_squared",
        gated_feed_forward=False,
        rotary_dim=None,
        unrotated_layers=frozenset(layers),
        qkv_bias=values.has_tensor(f"blk.{attention}.attn_q.bias"),
        attention_output_bias=values.has_tensor(f"blk.{attention}.attn_output.bias"),
        mlp_bias=values.has_tensor(f"blk.{network}.ffn_down.bias"),
        feed_forward_layers=fed,
        recurrent=Mamba2Config(
            layers=recurrent,
            has_bias=values.has_tensor(f"blk.{mamba}.ssm_in.bias"),
            has_convolution_bias=values.has_tensor(f"blk.{mamba}.ssm_conv1d.bias"),
            **_recurrent_sizes(values),
        ),
        experts=None if config.experts is None else _experts(config.experts, values, frozenset(layers) - fed),
    )


def _experts(experts: ExpertsConfig, values: GgufMetadata, others: frozenset[int]) -> ExpertsConfig:
    """The experts of DeepSeek-V3 without gates, in all layers but ``others``."""
    routing = RoutingConfig(
        scores="sigmoid",
        normalize_weights=bool(values.get("expert_weights_norm", True)),
        weight_multiplier=float(values.get("expert_weights_scale", 1.0)) or 1.0,
        has_selection_bias=True,
        groups=int(values.get("expert_group_count", 1)) or 1,
        groups_per_token=int(values.get("expert_group_used_count", 1)) or 1,
        group_scores="top_2_sum",
        in_float32=True,
    )
    shared = values.number("expert_shared_feed_forward_length")
    return replace(experts, routing=routing, dense_layers=others, shared_intermediate_size=shared)


def _recurrent_sizes(values: GgufMetadata) -> dict[str, Any]:
    value_heads, channels = values.number("ssm.time_step_rank"), values.number("ssm.inner_size")
    if value_heads < 1 or channels % value_heads:
        raise values.error("ssm.inner_size", str(channels), f"a multiple of ssm.time_step_rank, {value_heads}")
    return {
        "key_heads": values.number("ssm.group_count"),
        "value_heads": value_heads,
        "key_dim": values.number("ssm.state_size"),
        "value_dim": channels // value_heads,
        "taps": values.number("ssm.conv_kernel"),
    }


def _without_further_layers(config: ModelConfig, values: GgufMetadata) -> ModelConfig:
    further = int(values.get("nextn_predict_layers", 0))
    if not 0 <= further < config.num_layers:
        raise values.error("nextn_predict_layers", str(further), f"fewer than the {config.num_layers} layers")
    return replace(config, num_layers=config.num_layers - further, prediction_layers=further)
