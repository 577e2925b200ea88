"""Writes models of transformers as GGUF files, with the names, values and keys of llama.cpp's converter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import ExpertGatingFuncType, RopeScalingType
from gguf.quants import dequantize, quantize
from torch import Tensor

ARCHITECTURES = {
    "mixtral": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "qwen3_moe": "qwen3moe",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
}
"""Of GGUF by those of transformers, where they differ."""
MODEL_ARCH_BY_NAME: dict[str, MODEL_ARCH] = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}


def _single_tensors(model: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``model``, gates and values of experts apart, with the rows of matrices first."""
    is_transposed = architecture in ("llama4", "gpt-oss")
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            yield name.removesuffix("_bias") + ".bias", tensor
        elif name.endswith("sinks"):
            yield f"{name}.weight", tensor
        elif (match := re.fullmatch(r"(.+\.experts\.)(gate_up|down)_proj(_bias)?", name)) is None:
            yield name, tensor
        else:
            kind = "bias" if match[3] else "weight"
            rows = tensor.mT if is_transposed and kind == "weight" else tensor
            if match[2] == "down":
                yield f"{match[1]}down_proj.{kind}", rows
                continue
            parts = (rows[:, ::2], rows[:, 1::2]) if architecture == "gpt-oss" else rows.chunk(2, dim=1)
            for part, each in zip(("gate", "up"), parts, strict=True):
                yield f"{match[1]}{part}_proj.{kind}", each


def _add_settings(writer: GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for name in ("layer_norm_eps", "norm_epsilon"):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_rope(writer, config, architecture, head_dim)
    _add_windows(writer, config, architecture)
    if (experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture in ("qwen2moe", "qwen3moe", "glm4moe", "llama4", "minimax-m2", "gpt-oss"):
            size = getattr(config, "moe_intermediate_size", config.intermediate_size)
            writer.add_expert_feed_forward_length(size)
    if architecture == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if architecture in ("minimax-m2", "glm4moe"):
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if architecture == "glm4moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "logit_scale"):
        writer.add_logit_scale(config.logit_scale)


def _add_rope(writer: GGUFWriter, config: Any, architecture: str, head_dim: int) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if architecture in ("glm4", "glm4moe", "minimax-m2", "phi3"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if architecture in ("olmo2", "gpt-oss", "mistral3") and rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "olmo2" and rope.get("attention_factor") is not None:
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])

    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        ratio = math.log(config.max_position_embeddings / original) / math.log(original)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + ratio))
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _add_windows(writer: GGUFWriter, config: Any, architecture: str) -> None:
    if architecture in ("gemma2", "gemma3", "cohere2", "gpt-oss") or config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window)
    if architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture in ("gemma2", "gemma3"):
        for cap, add in (
            (config.attn_logit_softcapping, writer.add_attn_logit_softcapping),
            (config.final_logit_softcapping, writer.add_final_logit_softcapping),
        ):
            if cap is not None:
                add(cap)


def write_gguf_file(
    path: Path,
    model: Any,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    draw: Callable[[tuple[int, ...]], np.ndarray] | None = None,
    rope_factors: Tensor | None = None,
    metadata: Callable[[GGUFWriter], None] = lambda _: None,
    leave_out: Sequence[str] = (),
    **options: int,
) -> Path:
    """A transformers model as llama.cpp's converter would write it.

    Matrices become ``kind``; with ``draw``, which returns the bytes for a shape, the model gets their values."""
    architecture = ARCHITECTURES.get(model.config.model_type, model.config.model_type.removesuffix("_text"))
    config = model.config
    writer = GGUFWriter(path, architecture, **options)
    _add_settings(writer, config, architecture)
    metadata(writer)
    names = get_tensor_name_map(MODEL_ARCH_BY_NAME[architecture], config.num_hidden_layers)
    for name, tensor in _single_tensors(model, architecture):
        if name in leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        order = np.arange(len(tensor))
        if architecture in ("llama", "mistral3") and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            order = order.reshape(heads, 2, -1).swapaxes(1, 2).flatten()
        quantized = tensor.ndim > 1 and not re.search(r"\.bias$|_norm|\.mlp\.gate\.|router", name)
        if draw is not None and quantized:
            raw = draw(tuple(tensor.shape))
            tensor[order] = torch.from_numpy(dequantize(raw, kind))
        values = tensor.numpy()[order]
        if ".shared_expert_gate." in name:
            values, quantized = values[0], False
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if draw is None or not quantized:
            raw = quantize(values, kind if quantized else GGMLQuantizationType.F32)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, raw, raw_dtype=kind if quantized else GGMLQuantizationType.F32)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
