"""Hugging Face's tensor names of each family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_runtime.model.config import ModelConfig


@dataclass(frozen=True)
class TensorNames:
    """Without ``.weight`` and ``.bias``; names in a layer are without its prefix. The defaults are Llama's."""

    embedding: str = "model.embed_tokens"
    learned_positions: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    mixer_norm: str = "norm"
    """The only norm of a layer with one of attention, recurrence and feed-forward alone."""
    attention_norm: str = "input_layernorm"
    attention_output_norm: str = "post_attention_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_output_norm: str = "post_feedforward_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one that holds all three."""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_sinks: str = "self_attn.sinks"
    """Full name."""
    query_down: str = "self_attn.q_a_proj"
    query_down_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_down_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    attention_output: str = "self_attn.o_proj"
    log_rates: str = "linear_attn.A_log"
    """Full name, as the next two."""
    step_biases: str = "linear_attn.dt_bias"
    skips: str = "mixer.D"
    convolution: str = "linear_attn.conv1d"
    recurrent_norm: str = "linear_attn.norm"
    recurrent_inputs: tuple[str, ...] = ("linear_attn.in_proj_qkvz",)
    """Of gated delta layers the matrix of queries, keys and values and that of gates, or one that has for each key head
    its query and key, then the values and the gates of its value heads.
    """
    recurrent_gates: tuple[str, ...] = ("linear_attn.in_proj_ba",)
    """The matrix of strengths and that of steps, or one that has for each key head those of its value heads."""
    recurrent_output: str = "linear_attn.out_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two matrices, or one that holds both, or the only one of a network without gates."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    """Full name."""
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacked_experts: Literal["", "rows", "transposed", "interleaved"] = ""
    """Of a safetensors file that may have one tensor for all experts of a layer: ``rows``, [experts, out, in], gates
    before values; ``transposed``: the same as [experts, in, out]; ``interleaved``: so with alternating gates and
    values. The names of the single experts are those that the reader gives them.
    """
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_expert_gate: str = "mlp.shared_expert_gate"
    longer_prefix: str = ""
    """A file may have it in place of ``model.``."""
    transposed: bool = False
    """Whether matrices are stored as [in, out]."""
    ignored_prefixes: tuple[str, ...] = ()
    """Prefixes of tensors of other parts of the model than its decoder."""


def _multimodal(text: TensorNames, vision: str) -> TensorNames:
    """The text model in a checkpoint with a vision model, whose tensors begin with ``vision``."""
    prefix = "language_model."
    return replace(
        text,
        embedding=prefix + text.embedding,
        final_norm=prefix + text.final_norm,
        head=prefix + text.head,
        layer=prefix + text.layer,
        ignored_prefixes=(vision, "multi_modal_projector."),
    )


_LLAMA = TensorNames()
_GEMMA = replace(_LLAMA, feed_forward_norm="pre_feedforward_layernorm")
_MIXTRAL = replace(
    _LLAMA,
    router="block_sparse_moe.gate",
    selection_bias="block_sparse_moe.e_score_correction_bias",
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)
_QWEN_2_MOE = replace(
    _LLAMA,
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)
_QWEN_3_5 = replace(
    _QWEN_2_MOE,
    recurrent_inputs=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    recurrent_gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    stacked_experts="rows",
    ignored_prefixes=("mtp.", "model.visual."),
)
_LANGUAGE_MODEL = "model.language_model."
_QWEN_3_5_ALONE = replace(_QWEN_3_5, longer_prefix=_LANGUAGE_MODEL)
_QWEN_3_5_WITH_VISION = replace(
    _QWEN_3_5,
    embedding=_LANGUAGE_MODEL + "embed_tokens",
    final_norm=_LANGUAGE_MODEL + "norm",
    layer=_LANGUAGE_MODEL + "layers.{}.",
)
_LLAMA_4 = replace(
    _LLAMA,
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert="feed_forward.experts.{}.",
    stacked_experts="transposed",
    shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)
_NEMOTRON_H = TensorNames(
    embedding="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    attention_output="mixer.o_proj",
    log_rates="mixer.A_log",
    step_biases="mixer.dt_bias",
    convolution="mixer.conv1d",
    recurrent_norm="mixer.norm",
    recurrent_inputs=("mixer.in_proj",),
    recurrent_output="mixer.out_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    selection_bias="mixer.gate.e_score_correction_bias",
    expert="mixer.experts.{}.",
    expert_gate_up=("up_proj",),
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    ignored_prefixes=("mtp.",),
)
_OTHERS = {
    "mistral3": _multimodal(_LLAMA, "vision_tower."),
    "starcoder2": replace(_LLAMA, gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    "glm4": replace(
        _LLAMA,
        attention_output_norm="post_self_attn_layernorm",
        feed_forward_output_norm="post_mlp_layernorm",
        gate_up=("mlp.gate_up_proj",),
    ),
    "minimax_m2": _MIXTRAL,
    "llama4_text": _LLAMA_4,
    "llama4": _multimodal(_LLAMA_4, "vision_model."),
    "gpt_oss": replace(_LLAMA, router="mlp.router", stacked_experts="interleaved"),
    "phi3": replace(_LLAMA, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "gemma2": _GEMMA,
    "gemma3": _multimodal(_GEMMA, "vision_tower."),
    "gemma3_text": _GEMMA,
    "qwen2_moe": _QWEN_2_MOE,
    "qwen3_next": replace(_QWEN_2_MOE, ignored_prefixes=("mtp.",)),
    "qwen3_5_text": _QWEN_3_5_ALONE,
    "qwen3_5_moe_text": _QWEN_3_5_ALONE,
    "qwen3_5": _QWEN_3_5_WITH_VISION,
    "qwen3_5_moe": _QWEN_3_5_WITH_VISION,
    "nemotron_h": _NEMOTRON_H,
    "mixtral": _MIXTRAL,
    "gpt2": TensorNames(
        embedding="transformer.wte",
        learned_positions="transformer.wpe",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        feed_forward_norm="ln_2",
        qkv=("attn.c_attn",),
        attention_output="attn.c_proj",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        transposed=True,
    ),
}


def tensor_names(architecture: str) -> TensorNames:
    """The names in a checkpoint of ``architecture``."""
    return _OTHERS.get(architecture, _LLAMA)


def ignored_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of tensors that the decoder does not use."""
    names = tensor_names(config.architecture)
    further = range(config.num_layers, config.num_layers + config.prediction_layers)
    return names.ignored_prefixes + tuple(names.layer.format(layer) for layer in further)


def name_of_tied_head(config: ModelConfig) -> str | None:
    """The tensor that may exist as a copy of the embedding; None where the head is separate."""
    return f"{tensor_names(config.architecture).head}.weight" if config.tie_word_embeddings else None
