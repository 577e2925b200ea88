"""Writes models with recurrent layers of transformers as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from runtime_support.gguf_writing import MODEL_ARCH_BY_NAME
from torch import Tensor

SMALL = re.compile(r"\.(A_log|D|dt_bias)$|norm|conv1d|\.gate\.|shared_expert_gate")
"""Tensors that stay in float32."""
ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
"""Of GGUF by those of transformers, of the Qwen family."""


def split_inputs(matrix: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of all heads, and the gates, of rows that are ordered by key heads."""
    heads, of_head = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [of_head * config.linear_value_head_dim] * 2
    parts = matrix.view(heads, sum(sizes), -1).split(sizes, dim=1)
    queries, keys, values, gates = (part.flatten(0, 1) for part in parts)
    return torch.cat([queries, keys, values]), gates


def _permuted(rows: Tensor, heads: int) -> Tensor:
    """The order for a rotation of adjacent rows, into which Nemotron-H's rows come too."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _tiled(heads: Tensor, config: Any) -> Tensor:
    """Rows of value heads, ordered by key heads, as the first heads of all key heads, then their second ones."""
    shape = (config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads, -1)
    return heads.reshape(*shape, *heads.shape[1:]).transpose(0, 1).reshape(heads.shape)


def _qwen3_5(model: Any) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    for name, tensor in model.state_dict().items():
        part = name.partition("linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            yield name, torch.cat([tensor[:keys], _tiled(tensor[keys:], config)])
        elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            yield name, _tiled(tensor, config)
        elif part == "out_proj.weight":
            yield name, _tiled(tensor.mT, config).mT
        else:
            yield name, tensor


def _qwen3_next(
    model: Any, tensors: Iterable[tuple[str, Tensor]], *, legacy: bool, fused: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if (match := re.fullmatch(r"(.+\.experts\.)(gate_up|down)_proj", name)) is not None:
            halves = zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
            parts = list(halves) if match[2] == "gate_up" and not fused else [(match[2], tensor)]
            yield from ((f"{match[1]}{part}_proj.weight", each) for part, each in parts)
        elif name.endswith("in_proj_qkvz.weight") and not legacy:
            layer = name.split(".")[2]
            mixed, gates = split_inputs(tensor, model.config)
            yield f"blk.{layer}.attn_qkv.weight", mixed
            yield f"blk.{layer}.attn_gate.weight", gates
        elif name.endswith("A_log"):
            yield name, -tensor.exp()
        elif name.endswith("dt_bias"):
            yield name.removesuffix("dt_bias") + "dt_proj.bias", tensor
        elif name.endswith("conv1d.weight"):
            yield name, tensor.squeeze(1)
        elif name.endswith("shared_expert_gate.weight"):
            yield name, tensor[0]
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            yield name, tensor + 1
        else:
            yield name, tensor


def _nemotron_h(model: Any) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    for full_name, tensor in model.state_dict().items():
        name = re.sub(r"^model\.", "backbone.", full_name)
        if (match := re.fullmatch(r"(.+\.experts\.)(up|down)_proj", name)) is not None:
            yield f"model.layers.{name.split('.')[2]}.mlp.experts.{match[2]}_proj.weight", tensor
        elif name.endswith("A_log"):
            yield name, -tensor.exp().reshape(-1, 1)
        elif name.endswith("mixer.D"):
            yield name, tensor.reshape(-1, 1)
        elif name.endswith("dt_bias") or name.endswith("e_score_correction_bias"):
            yield name.removesuffix("_bias") + ".bias", tensor
        elif name.endswith("conv1d.weight"):
            yield name, tensor.squeeze(1)
        elif name.endswith("mixer.norm.weight"):
            yield name, tensor.reshape(config.n_groups, -1)
        elif (match := re.search(r"\.([qk])_proj\.", name)) is not None:
            yield name, _permuted(tensor, config.num_attention_heads if match[1] == "q" else config.num_key_value_heads)
        else:
            yield name, tensor


def _tensors(model: Any, architecture: str, *, legacy: bool, fused: bool) -> Iterator[tuple[str, Tensor]]:
    if architecture.startswith("nemotron"):
        return _nemotron_h(model)
    tensors = model.state_dict().items() if architecture == "qwen3next" else _qwen3_5(model)
    return _qwen3_next(model, tensors, legacy=legacy, fused=fused)


def _add_qwen(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if (size := getattr(config, "intermediate_size", None)) is not None:
        writer.add_feed_forward_length(size)
    if config.model_type.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if config.model_type != "qwen3_5_text":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_nemotron_h(writer: GGUFWriter, config: Any, *, has_experts: bool) -> None:
    kinds = config.layers_block_type
    fed, size = ("moe", config.moe_intermediate_size) if has_experts else ("mlp", config.intermediate_size)
    heads = config.num_key_value_heads
    writer.add_feed_forward_length([size if kind == fed else 0 for kind in kinds])
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    if has_experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _add_settings(writer: GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(2**20 if "nemotron" in architecture else config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if architecture.startswith("qwen"):
        _add_qwen(writer, config)
    else:
        _add_nemotron_h(writer, config, has_experts=architecture.endswith("_moe"))


def write_hybrid_gguf(
    path: Path,
    model: Any,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    other_kinds: Mapping[str, GGMLQuantizationType] | None = None,
    legacy: bool = False,
    fused: bool = False,
    metadata: Callable[[GGUFWriter], None] = lambda _: None,
    leave_out: str = "nothing",
    extra: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """A model of transformers as llama.cpp's converter would write it. Matrices become ``kind``.

    Args:
        other_kinds: Those of matrices whose names end so.
        legacy: With the inputs of a gated delta layer in one tensor, as the first version of the converter wrote them.
        fused: With the gates and values of experts in one tensor, as by ``--fuse-gate-up-exps``.
        metadata: Changes the metadata before it is written.
        leave_out: The end of the names of tensors that are not written.
        extra: The shapes of further tensors by name.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, "nemotron_h")
    if "moe" in getattr(config, "layers_block_type", []):
        architecture += "_moe"
    writer = GGUFWriter(path, architecture)
    _add_settings(writer, config, architecture)
    metadata(writer)
    names = get_tensor_name_map(MODEL_ARCH_BY_NAME[architecture], config.num_hidden_layers)
    for name, tensor in _tensors(model, architecture, legacy=legacy, fused=fused):
        stored = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if stored.endswith(leave_out):
            continue
        kinds = [other for end, other in (other_kinds or {}).items() if stored.endswith(end)]
        each = (kinds or [kind])[0] if tensor.ndim > 1 and not SMALL.search(name) else GGMLQuantizationType.F32
        writer.add_tensor(stored, quantize(np.ascontiguousarray(tensor.numpy()), each), raw_dtype=each)
    for name, shape in (extra or {}).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
