"""GGUF files of every architecture, as written by llama.cpp's converter, have the logits of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from runtime_support.family_models import MINISTRAL_3_ROPE, YARN
from runtime_support.reference_models import CLOSE, EXPERTS, LLAMA_3, LONG_ROPE, logits_of

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.formats.gguf_config import gguf_config
from megatron_runtime.model.formats.gguf_file import GgufFile

WHOLE_EXPERTS = EXPERTS | {"moe_intermediate_size": 32, "norm_topk_prob": True}
"""Of sizes that GGUF's blocks of 32 divide."""
OLMO_3_ROPE = {
    "full_attention": YARN | {"attention_factor": 1.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
TWICE = {"short_factor": [1.1] * 8, "long_factor": [1.5, 2.0, 2.5, 3.0] * 2}
GLM_4_5 = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}
GPT_OSS = YARN | {"truncate": False}
LLAMA_4 = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
}
GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 16}
WriteGguf = Callable[..., Path]


def assert_same_logits(path: Path, model: Any, paged_requests: Any) -> None:
    tokens = list(range(1, 40))
    expected = logits_of(model, tokens)
    logits = paged_requests(load_model(path, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 64}),
        ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
        ("Qwen3Moe", WHOLE_EXPERTS),
        ("Gemma", {}),
        ("Gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
        ("Gemma3", GEMMA | {"num_hidden_layers": 7}),
        ("Phi3", {"sliding_window": 7}),
        ("Phi3", {"rope_parameters": LONG_ROPE | TWICE, "original_max_position_embeddings": 16}),
        ("Qwen2Moe", EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}),
        ("Glm4Moe", GLM_4_5),
        ("SeedOss", {}),
        ("Ministral3", {"rope_parameters": MINISTRAL_3_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("Starcoder2", {"head_dim": None}),
        ("Olmo2", {}),
        ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 6, "rope_parameters": OLMO_3_ROPE}),
        ("Glm4", {}),
        ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
        ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 6}),
        ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}),
        ("Llama4", LLAMA_4),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "rope_parameters": GPT_OSS}),
    ],
)
def test_a_converted_model_has_the_logits_of_the_original(
    family: str,
    changes: dict[str, Any],
    tmp_path: Path,
    write_gguf: WriteGguf,
    paged_requests: Any,
    model_of_blocks: Any,
) -> None:
    model = model_of_blocks(family, **changes)
    assert_same_logits(write_gguf(tmp_path / "model.gguf", model), model, paged_requests)


def test_layers_that_predict_further_tokens_are_ignored(
    tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, model_of_blocks: Any
) -> None:
    def further(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("glm4moe.block_count")
        writer.add_block_count(3)
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "attn_norm", "ffn_up_exps"):
            writer.add_tensor(f"blk.2.{name}.weight", np.zeros((4, 2, 32), np.float32))

    model = model_of_blocks("Glm4Moe", **GLM_4_5)
    path = write_gguf(tmp_path / "model.gguf", model, metadata=further)
    assert inspect_checkpoint(path).config.prediction_layers == 1
    assert_same_logits(path, model, paged_requests)


def test_gemma_3_scales_the_rotary_frequencies_of_its_global_layers_alone(
    tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, model_of_blocks: Any
) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    model = model_of_blocks("Gemma3", num_hidden_layers=6, rope_parameters=rope, **GEMMA)

    def scaling(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    assert_same_logits(write_gguf(tmp_path / "model.gguf", model, metadata=scaling), model, paged_requests)


@pytest.mark.parametrize(
    ("family", "layers", "per_head"), [("gemma2", 26, 16), ("gemma2", 46, 8), ("gemma3", 34, 16), ("gemma3", 62, 8)]
)
def test_the_attention_scale_of_gemma_depends_on_its_number_of_layers(
    family: str, layers: int, per_head: int, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", family)
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_vocab_size(10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = gguf_config(GgufFile(tmp_path / "model.gguf"))
    assert config.attention_scale == pytest.approx(per_head**-0.5)
    assert config.layer_windows == ()


def test_the_rotary_factors_of_llama_3_are_applied(
    tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, model_of_blocks: Any
) -> None:
    model = model_of_blocks(rope_parameters=LLAMA_3)
    plain = 500.0 ** (-torch.arange(0, 16, 2).float() / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    assert_same_logits(write_gguf(tmp_path / "model.gguf", model, rope_factors=factors), model, paged_requests)


def test_linear_rotary_scaling_is_applied(
    tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, model_of_blocks: Any
) -> None:
    model = model_of_blocks(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})

    def scaling(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    assert_same_logits(write_gguf(tmp_path / "model.gguf", model, metadata=scaling), model, paged_requests)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_yarn_is_applied_and_lengthens_the_model(
    family: str, tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, model_of_blocks: Any
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    model = model_of_blocks(family, rope_parameters=rope)

    def scaling(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    path = write_gguf(tmp_path / "model.gguf", model, metadata=scaling)
    assert inspect_checkpoint(path).config.max_position_embeddings == 256
    assert_same_logits(path, model, paged_requests)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("yarn_attn_factor", 2.0, "qwen2.rope.scaling.yarn_attn_factor is 2.0, only 1.0 is supported"),
        ("original_context_length", 0.0, "the numbers of yarn are RopeScaling(kind='yarn', factor=8.0"),
        ("factor", -1.0, "the numbers of yarn are RopeScaling(kind='yarn', factor=-1.0"),
    ],
)
def test_numbers_of_yarn_that_can_not_be_served_are_named(
    key: str, value: float, said: str, tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    keys = {"factor": 8.0, "original_context_length": 32.0} | {key: value}

    def scaling(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        for name, number in keys.items():
            writer.add_float32(f"qwen2.rope.scaling.{name}", number)

    path = write_gguf(tmp_path / "model.gguf", model_of_blocks("Qwen2"), metadata=scaling)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        inspect_checkpoint(path)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expert_shared_count": 1}, "qwen3moe.expert_shared_count is 1, only 0 is supported"),
        ({"expert_used_count": 5}, "number of experts per token is 5, expected 1 to 4"),
        ({"expert_count": 3}, "tensors: model.layers.0.mlp.experts.3.gate_proj.weight"),
        ({"expert_feed_forward_length": 33}, "gate_proj.weight has shape [32, 64], but the configuration expects [33"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_experts_that_do_not_fit_the_metadata_are_named(
    keys: dict[str, int], said: str, tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    def change(writer: GGUFWriter) -> None:
        for name, number in keys.items():
            writer.kv_data[0].pop(f"qwen3moe.{name}", None)
            writer.add_uint32(f"qwen3moe.{name}", number)

    path = write_gguf(tmp_path / "model.gguf", model_of_blocks("Qwen3Moe", **WHOLE_EXPERTS), metadata=change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        inspect_checkpoint(path)
