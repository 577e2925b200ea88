"""Small random models, requests for them, and a writer of GGUF files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from runtime_support.paged_requests import PagedRequests
from runtime_support.reference_models import SIZES, new_model, selection_biases
from torch import Tensor

ARCHITECTURES = {"mixtral": "llama", "mistral": "llama", "qwen3_moe": "qwen3moe"}
"""Of GGUF by those of transformers, where they differ."""
MODEL_ARCH_BY_NAME: dict[str, MODEL_ARCH] = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}

BLOCK_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="session")
def paged_requests() -> type[PagedRequests]:
    """``paged_requests(decoder)``: an empty cache for the decoder, and methods to run requests."""
    return PagedRequests


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    """``random_model(family, ...)``: a small model of transformers with random weights, of the sizes given or SIZES."""
    return _random_model


@pytest.fixture(scope="session")
def model_of_blocks() -> Callable[..., Any]:
    """The same, of sizes that GGUF's blocks of 32 divide."""
    return partial(_random_model, std=0.1, **BLOCK_SIZES)


@pytest.fixture(scope="session")
def save_model() -> Callable[..., Any]:
    """``save_model(folder, family, ...)``: the same, saved in ``folder``."""

    def save(folder: Path, family: str, **settings: Any) -> Any:
        model = _random_model(family, **settings)
        model.save_pretrained(folder)
        return model

    return save


def _random_model(family: str = "Llama", *, kind: str = "ForCausalLM", std: float = 0.2, **settings: Any) -> Any:
    model = new_model(family, kind=kind, **(SIZES | settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=std)
    for bias in selection_biases(model):
        torch.nn.init.normal_(bias, std=std)
    return model


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """``write_gguf(path, model, ...)``: a transformers model as llama.cpp's converter would write it."""
    return _write_gguf


def _gguf_parts(name: str, raw: np.ndarray, names: Any) -> list[tuple[str, np.ndarray]]:
    """A tensor under its name in GGUF; gate and up of experts are separate, which transformers stores together."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name):
        parts = [raw] if match[2] == "down" else np.split(raw, 2, axis=1)
        return [
            (f"blk.{match[1]}.ffn_{kind}_exps.weight", np.ascontiguousarray(part))
            for kind, part in zip(match[2].split("_"), parts, strict=True)
        ]
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None
    return [(stored, raw)]


def _add_settings(writer: GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
        for cap, add in (
            (config.attn_logit_softcapping, writer.add_attn_logit_softcapping),
            (config.final_logit_softcapping, writer.add_final_logit_softcapping),
        ):
            if cap is not None:
                add(cap)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if (experts := getattr(config, "num_local_experts", None)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _write_gguf(
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
    """Matrices become ``kind``; with ``draw``, which returns the bytes for a shape, the model gets their values."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type.removesuffix("_text"))
    writer = GGUFWriter(path, architecture, **options)
    _add_settings(writer, config, architecture)
    metadata(writer)
    names = get_tensor_name_map(MODEL_ARCH_BY_NAME[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name in leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        order = np.arange(len(tensor))
        if architecture == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
            order = order.reshape(heads, 2, -1).swapaxes(1, 2).flatten()
        quantized = tensor.ndim > 1 and ".mlp.gate." not in name
        if draw is not None and quantized:
            raw = draw(tuple(tensor.shape))
            tensor[order] = torch.from_numpy(dequantize(raw, kind))
        values = tensor.numpy()[order]
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if draw is None or not quantized:
            raw = quantize(values, kind if quantized else GGMLQuantizationType.F32)
        for stored, part in _gguf_parts(name, raw, names):
            writer.add_tensor(stored, part, raw_dtype=kind if quantized else GGMLQuantizationType.F32)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
