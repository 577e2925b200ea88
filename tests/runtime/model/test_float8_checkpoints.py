"""Safetensors with matrices in fp8 have the weights that their definition gives, on one rank and on several."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import model_scenarios
from runtime_support.quantized_safetensors import (
    Quantize,
    QuantizedPair,
    assert_same_weights,
    quantize_folder,
    to_float8,
)
from runtime_support.rank_processes import run_ranks
from runtime_support.reference_models import CLOSE
from safetensors.torch import load_file, save_file
from suite_support.worker import free_port
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model, open_checkpoint
from megatron_runtime.model.refit import update_weights
from megatron_runtime.parallel.layout import ParallelSizes

WIDE = {"hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = WIDE | {"head_dim": 40}
EXPERTS = LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 152, "norm_topk_prob": True}
MINIMAX = WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 40, "rotary_dim": 20}
DEEPSEEK = WIDE | {
    "kv_lora_rank": 136,
    "q_lora_rank": 144,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 36,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 152,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "one matrix for all of gate and up": ("Phi3", LLAMA),
    "experts": ("Qwen3Moe", EXPERTS),
    "minimax": ("MiniMaxM2", MINIMAX),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "inputs of gated delta layers, by key heads": ("Qwen3Next", EXPERTS | DELTA),
    "inputs of gated delta layers": ("Qwen3_5", LLAMA | DELTA),
}
BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
BY_BLOCKS = to_float8((128, 128), name="weight_scale_inv")


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """The configuration of compressed-tensors for fp8."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy} | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": scheme | {"dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


ACTIVATIONS = {"input_scale": torch.tensor(0.5), "k_scale": torch.tensor([1.5])}
KINDS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "blocks": (BY_BLOCKS, BLOCKS),
    "blocks of another size": (
        to_float8((64, 32), name="weight_scale_inv", scale_dtype=torch.bfloat16),
        BLOCKS | {"weight_block_size": [64, 32]},
    ),
    "blocks with scales that are powers of two": (
        to_float8((128, 128), name="weight_scale_inv", scale_dtype=torch.float8_e8m0fnu),
        BLOCKS | {"scale_fmt": "ue8m0"},
    ),
    "blocks without their size": (BY_BLOCKS, {"quant_method": "fp8"}),
    "one scale without dimensions": (
        to_float8(name="weight_scale_inv", scale_dtype=torch.bfloat16, scale_shape=(), further=ACTIVATIONS),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "AutoFP8": (to_float8(scale_shape=(), further=ACTIVATIONS), {"quant_method": "fp8", "activation_scheme": "static"}),
    "FBGEMM": (
        to_float8((1, 0), further={"input_scale_ub": torch.tensor([1200.0])}),
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    ),
    "modelopt": (
        to_float8(scale_shape=(), further={"input_scale": torch.tensor(0.5), "v_scale": torch.tensor(1.0)}),
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": None},
    ),
    "compressed, a tensor": (to_float8(scale_shape=(1,), scale_dtype=torch.bfloat16), compressed("tensor")),
    "compressed, channels": (to_float8((1, 0)), compressed("channel")),
    "compressed, blocks": (to_float8((128, 128)), compressed("block", block_structure=[128, 128])),
    "compressed, groups": (to_float8((1, 40)), compressed("group", group_size=40)),
    "five bits of exponent": (to_float8((1, 0), dtype=torch.float8_e5m2), compressed("channel")),
}


@pytest.fixture
def save(tmp_path: Path, save_model: Any) -> Any:
    """``save(family, quantize, settings)``: a small random checkpoint, quantized and plain."""

    def write(family: str, quantize: Quantize, settings: dict[str, Any], **options: Any) -> QuantizedPair:
        name, sizes = FAMILIES[family]
        save_model(tmp_path / family, name, **sizes)
        return quantize_folder(tmp_path / family, quantize, settings, **options)

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_have_the_weights_of_the_definition(family: str, save: Any) -> None:
    assert_same_weights(save(family, BY_BLOCKS, BLOCKS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_kinds_of_scales_have_the_weights_of_the_definition(kind: str, dtype: str, save: Any) -> None:
    assert_same_weights(save("llama", *KINDS[kind]), dtype)


def test_scales_may_be_in_another_file_than_their_matrix(save: Any) -> None:
    assert_same_weights(save("llama", BY_BLOCKS, BLOCKS, files=3))


@pytest.mark.parametrize("kind", ["blocks", "one scale without dimensions", "FBGEMM", "compressed, groups"])
def test_every_part_of_a_matrix_can_be_read(kind: str, save: Any) -> None:
    pair = save("llama", *KINDS[kind])
    _, source, _ = open_checkpoint(pair.quantized)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        matrix = pair.weights[name].float()
        for rows, columns in (
            ((0, 160), (0, 160)),
            ((100, 157), (30, 135)),
            ((127, 129), (127, 128)),
            ((159, 160), (5, 6)),
        ):
            into = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
            assert sum(source.read(name, into, (rows[0], columns[0]))) == into.numel()
            assert torch.equal(into, matrix[slice(*rows), slice(*columns)])


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", ParallelSizes(tensor=2)),
        ("deepseek", ParallelSizes(tensor=2, expert=2)),
        ("experts", ParallelSizes(expert=2, pipeline=2)),
    ],
    ids=["tensor", "experts with latent attention", "experts and stages"],
)
def test_ranks_divide_matrices_within_blocks(family: str, sizes: ParallelSizes, save: Any) -> None:
    pair = save(family, BY_BLOCKS, BLOCKS)
    ranks = sizes.ranks_per_replica_group
    said = run_ranks(model_scenarios.answer_all, ranks, sizes, free_port(), [(pair.quantized, 8), (pair.plain, 8)])
    sampled = [answers for answers in said if answers[0].logits is not None]
    assert sampled
    for quantized, plain in sampled:
        assert torch.equal(quantized.logits, plain.logits)
        torch.testing.assert_close(plain.logits, model_scenarios.answer(pair.plain, steps=1).logits, **CLOSE)


def test_transformers_expands_the_same_weights(tmp_path: Path, save_model: Any) -> None:
    """It reads only matrices that whole blocks fill."""
    save_model(tmp_path / "it", "Qwen3", **(LLAMA | {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}))
    pair = quantize_folder(tmp_path / "it", BY_BLOCKS, BLOCKS)
    stored, ours = load_file(pair.quantized / "model.safetensors"), load_model(pair.quantized, dtype="float32")
    for name in pair.weights:
        given = {"weight": [stored[name]], "weight_scale_inv": [stored[f"{name}_scale_inv"]]}
        assert torch.equal(Fp8Dequantize(None).convert(given)["weight"], ours.destinations()[name])


def test_scales_of_activations_are_not_used_which_the_log_says(save: Any, caplog: pytest.LogCaptureFixture) -> None:
    pair = save("llama", *KINDS["AutoFP8"])
    with caplog.at_level(logging.INFO):
        load_model(pair.quantized, dtype="float32")
    assert "scales of activations and of the cache are not used: 21 input_scale, 21 k_scale" in caplog.text


def test_the_summary_counts_stored_bytes_and_loaded_elements(save: Any) -> None:
    pair = save("deepseek", BY_BLOCKS, BLOCKS)
    summary, plain = inspect_checkpoint(pair.quantized), inspect_checkpoint(pair.plain)
    assert summary.weight_bytes == sum(each.nbytes for each in load_file(pair.quantized / "model.safetensors").values())
    assert summary.num_parameters == plain.num_parameters
    assert summary.loaded_bytes(torch.bfloat16) == 2 * sum(
        math.prod(each.shape) for each in plain.source.tensors.values()
    )


def test_further_layers_and_the_copy_of_a_tied_head_are_ignored(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path / "tied", "Llama", **LLAMA, tie_word_embeddings=True)
    pair = quantize_folder(tmp_path / "tied", BY_BLOCKS, BLOCKS)
    tensors = load_file(pair.quantized / "model.safetensors")
    head, _ = BY_BLOCKS(tensors["model.embed_tokens.weight"])
    save_file(tensors | {f"lm_head.{name}": part for name, part in head.items()}, pair.quantized / "model.safetensors")
    assert_same_weights(pair)
    save_model(tmp_path / "further", "DeepseekV3", **DEEPSEEK)
    pair = quantize_folder(tmp_path / "further", BY_BLOCKS, BLOCKS)
    tensors = load_file(pair.quantized / "model.safetensors")
    further = {
        name.replace("layers.2.", "layers.3."): each.clone() for name, each in tensors.items() if "layers.2." in name
    }
    save_file(tensors | further, pair.quantized / "model.safetensors")
    for folder in (pair.quantized, pair.plain):
        config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
    assert_same_weights(pair)


def test_weights_can_be_updated_from_a_quantized_checkpoint(save: Any) -> None:
    pair = save("llama", BY_BLOCKS, BLOCKS)
    decoder = load_model(pair.plain, dtype="float32")
    expected = {name: weights.clone() for name, weights in decoder.destinations().items()}
    update_weights(decoder, pair.quantized)
    assert all(torch.equal(weights, expected[name]) for name, weights in decoder.destinations().items())


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{UP}.weight_scale_inv": None}, f"tensor {UP}.weight_scale missing, which a quantized matrix needs beside"),
        ({f"{UP}.weight": None}, f"tensor {UP}.weight missing"),
        (
            {f"{UP}.weight_scale_inv": torch.ones(1, 2)},
            f"tensor {UP}.weight_scale_inv has shape [1, 2], but quantization_config.weight_block_size requires [2, 2]",
        ),
        (
            {f"{UP}.weight_scale_inv": torch.ones(2, 2, dtype=torch.uint8)},
            f"tensor {UP}.weight_scale_inv has type U8, expected one of F32, BF16",
        ),
        (
            {f"{UP}.weight": torch.zeros(200, 160, dtype=torch.int8)},
            f"tensor {UP}.weight has type I8, but is no part of",
        ),
        ({f"{UP}.weight": torch.zeros(200, dtype=torch.float8_e4m3fn)}, "has shape [200], but quantized matrices have"),
        (
            {f"{UP}.weight": torch.zeros(200, 150, dtype=torch.float8_e4m3fn)},
            f"tensor {UP}.weight has shape [200, 150], but the configuration expects [200, 160]",
        ),
    ],
    ids=["no scale", "no matrix", "shape of scales", "type of scales", "type", "dimensions", "shape"],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], said: str, save: Any) -> None:
    pair = save("llama", BY_BLOCKS, BLOCKS)
    tensors = load_file(pair.quantized / "model.safetensors") | change
    save_file({name: each for name, each in tensors.items() if each is not None}, pair.quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(said)):
        inspect_checkpoint(pair.quantized)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantization_config.quant_method is 'bitsandbytes', the known ones are fp8",
        ),
        ({"bits": 4}, "quantization_config.quant_method is None, the known ones are fp8"),
        ({"quant_method": "mxfp4"}, "is 'mxfp4', the known ones are fp8, fbgemm_fp8, modelopt, compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', only 'FP8' is supported"),
        (BLOCKS | {"weight_block_size": [128]}, "weight_block_size is [128], expected two numbers above 0"),
        (BLOCKS | {"weight_block_size": [128, "a"]}, "weight_block_size is 'a', expected an integer"),
        (
            compressed("tensor") | {"format": "nvfp4-pack-quantized"},
            "quantization_config.format is 'nvfp4-pack-quantized'",
        ),
        (compressed("tensor") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is {'format'"),
        (
            compressed("tensor") | {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config is {'config_groups'",
        ),
        (compressed("tensor") | {"config_groups": None}, "quantization_config.config_groups is missing"),
        (compressed("token"), "config_groups.group_0.weights.strategy is 'token', the known ones are tensor, channel"),
        (compressed("group", group_size=0), "config_groups.group_0.weights.group_size is 0, expected 1 or more"),
        (
            compressed("block", block_structure=[0, 1]),
            "weights.block_structure is [0, 1], expected two numbers above 0",
        ),
        (compressed("tensor", num_bits=4), "weights.type is 'float' with quantization_config.config_groups.group_0"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:60],
)
def test_settings_that_are_not_supported_are_named(settings: dict[str, Any], said: str, save: Any) -> None:
    pair = save("llama", BY_BLOCKS, settings)
    with pytest.raises(CheckpointError, match=re.escape(said)) as raised:
        inspect_checkpoint(pair.quantized)
    assert "config.json" in str(raised.value)


def test_a_module_that_no_group_targets_is_named(save: Any) -> None:
    settings = compressed("channel")
    settings["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    with pytest.raises(CheckpointError, match=r"mlp\.\w+ is quantized, but no group of .*config_groups has it"):
        inspect_checkpoint(save("llama", to_float8((1, 0)), settings).quantized)


def test_a_transposed_family_is_refused(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path / "it", "GPT2", n_embd=32, n_head=4, n_layer=2, vocab_size=64, n_positions=64)
    config = json.loads((tmp_path / "it" / "config.json").read_text()) | {"quantization_config": BLOCKS}
    (tmp_path / "it" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="gpt2 is read without quantization only"):
        inspect_checkpoint(tmp_path / "it")
