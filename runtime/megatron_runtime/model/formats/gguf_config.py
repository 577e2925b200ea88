"""The metadata of a GGUF file as the configuration of a decoder."""

from __future__ import annotations

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import (
    ExpertsConfig,
    ModelConfig,
    RoutingConfig,
    check_num_layers,
    refuse_architecture,
)
from megatron_runtime.model.formats.gguf_families import (
    GGUF_FAMILIES,
    HUGGING_FACE_NAMES,
    PARTLY_ROTATED,
    WITH_EXPERTS_ALONE,
    WITH_SHARED_EXPERTS,
    WITH_SIZES_OF_LAYERS,
)
from megatron_runtime.model.formats.gguf_file import GgufFile
from megatron_runtime.model.formats.gguf_metadata import GgufMetadata
from megatron_runtime.model.formats.rope_fields import yarn_magnitude
from megatron_runtime.model.rope_scaling import RopeScaling


def gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration in ``file``. Raises CheckpointError for an unsupported architecture or value."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
        raise refuse_architecture(str(file.path), architecture, GGUF_FAMILIES)
    values = GgufMetadata(file, architecture)
    heads, hidden = values.number("attention.head_count"), values.number("embedding_length")
    head_dim = int(values.get("attention.key_length", hidden // max(heads, 1)))
    values.require("attention.value_length", head_dim)
    layers = check_num_layers(str(file.path), values.number("block_count"))
    if architecture not in PARTLY_ROTATED:
        values.require("rope.dimension_count", head_dim)
    rotated = int(values.get("rope.dimension_count", head_dim))
    names = file.tensors
    scaling = _rope_scaling(file, values, architecture)
    length = values.number("context_length")
    if scaling.kind == "yarn":  # some converters omit the length
        length = max(length, int(scaling.factor * scaling.original_max_position_embeddings))
    embedding = names.get("token_embd.weight")
    config = ModelConfig(
        architecture=HUGGING_FACE_NAMES.get(architecture, architecture),
        vocab_size=embedding.shape[0] if embedding else values.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=_feed_forward_size(values, architecture, layers),
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=_size(values, "attention.head_count_kv", architecture, layers, heads),
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=float(
            values.get("attention.layer_norm_rms_epsilon", values.get("attention.layer_norm_epsilon", 1e-5))
        ),
        rope_theta=float(values.get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        rotary_dim=None if rotated == head_dim else rotated,
        tie_word_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        attention_output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        query_key_norm="head" if "blk.0.attn_q_norm.weight" in names else "none",
        experts=_experts(values, architecture, layers),
    )
    config = GGUF_FAMILIES[architecture](config, values)
    config.check(str(file.path))
    return config


def _size(values: GgufMetadata, key: str, architecture: str, layers: int, default: int | None = None) -> int:
    if architecture in WITH_SIZES_OF_LAYERS:
        return values.size(key, layers)
    return values.number(key) if default is None else int(values.get(key, default))


def _feed_forward_size(values: GgufMetadata, architecture: str, layers: int) -> int:
    alone = values.number("expert_feed_forward_length") if architecture in WITH_EXPERTS_ALONE else None
    return _size(values, "feed_forward_length", architecture, layers, alone)


def _experts(values: GgufMetadata, architecture: str, layers: int) -> ExpertsConfig | None:
    """The same value in all layers; None without any."""
    count = int(values.get("expert_count", 0))
    if count == 0:
        return None
    if architecture not in WITH_SHARED_EXPERTS:
        values.require("expert_shared_count", 0)
    return ExpertsConfig(
        count=count,
        per_token=values.number("expert_used_count"),
        intermediate_size=int(
            values.get("expert_feed_forward_length", _feed_forward_size(values, architecture, layers))
        ),
        routing=RoutingConfig(normalize_weights=bool(values.get("expert_weights_norm", True))),
    )


def _rope_scaling(file: GgufFile, values: GgufMetadata, architecture: str) -> RopeScaling:
    kind = values.get("rope.scaling.type", "none")
    factor = float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 0.0)) or 1.0)
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return RopeScaling("linear", factor)
    if kind == "yarn":
        return _yarn(values, factor, architecture)
    if kind != "none":
        raise CheckpointError(
            f"{file.path}: rope scaling {kind!r} is not known; the known ones are none, linear and yarn"
        )
    return RopeScaling()


def _yarn(values: GgufMetadata, factor: float, architecture: str) -> RopeScaling:
    """Without the corrections that llama.cpp applies to other families.

    In files of Ministral 3 the multiplier of the logarithm is that of all channels, by which the magnitude is divided.
    """
    for key, neutral in (("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
        values.require(f"rope.scaling.{key}", neutral)
    if architecture != "mistral3":
        values.require("rope.scaling.yarn_log_multiplier", 0.0)
    divisor = yarn_magnitude(factor, float(values.get("rope.scaling.yarn_log_multiplier", 0.0)))
    return RopeScaling(
        "yarn",
        factor,
        low_frequency_factor=float(values.get("rope.scaling.yarn_beta_slow", 1.0)),
        high_frequency_factor=float(values.get("rope.scaling.yarn_beta_fast", 32.0)),
        original_max_position_embeddings=values.number("rope.scaling.original_context_length"),
        magnitude=float(values.get("rope.scaling.attn_factor", yarn_magnitude(factor) / divisor)),
    )
