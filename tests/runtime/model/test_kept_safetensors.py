"""Matrices of int4 and int8 in safetensors that stay quantized, on one rank and on several."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import model_scenarios
from runtime_support.paged_requests import PagedRequests
from runtime_support.quantized_safetensors import (
    Quantize,
    QuantizedPair,
    compressed_config,
    gptq_config,
    quantize_folder,
    to_awq,
    to_float8,
    to_gptq,
    to_int8,
    to_packed,
)
from runtime_support.rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from suite_support.worker import free_port

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.formats.quantized_weights import KeptKind
from megatron_runtime.model.quantized.kept_tensors import kept_weights
from megatron_runtime.model.quantized.linear import QuantizedLinear
from megatron_runtime.model.refit import offload_weights, restore_weights
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition
from megatron_runtime.parallel.single_rank import SingleRank

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "std": 0.05,
}
DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
}
TOKENS = list(range(1, 20))
CPU = torch.device("cpu")


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
KEPT: dict[str, tuple[Quantize, dict[str, Any], str]] = {
    "int4, groups of 32": (to_packed(4, 32), compressed_config("pack-quantized", 4, 32), "int4 in groups of 32"),
    "int4, rows": (to_packed(4, 0), compressed_config("pack-quantized", 4, 0), "int4 by rows"),
    "int4, zero points": (
        to_packed(4, 64, symmetric=False),
        compressed_config("pack-quantized", 4, 64, symmetric=False),
        "int4 in groups of 64 with zero points",
    ),
    "int8, rows": (to_int8(0), compressed_config("int-quantized", 8, 0), "int8 by rows"),
    "int8 in words": (to_packed(8, 128), compressed_config("pack-quantized", 8, 128), "int8 in groups of 128"),
    "gptq": (to_gptq(4, 128), gptq_config(4, 128), "GPTQ int4 in groups of 128"),
    "gptq, zero points": (
        to_gptq(4, 64, symmetric=False),
        gptq_config(4, 64, sym=False),
        "GPTQ int4 in groups of 64 with zero points",
    ),
    "gptq int8": (to_gptq(8, 0, version=2), gptq_config(8, -1, checkpoint_format="gptq_v2"), "GPTQ int8 by rows"),
    "awq": (to_awq(128), AWQ, "AWQ int4 in groups of 128 with zero points"),
}
EXPANDED: dict[str, tuple[Quantize, dict[str, Any], str]] = {
    "groups that blocks do not divide": (
        to_packed(4, 16),
        compressed_config("pack-quantized", 4, 16),
        "int4 in groups of 16",
    ),
    "columns in any order": (
        to_gptq(4, 32, shuffled=True),
        gptq_config(4, 32, desc_act=True),
        "GPTQ int4 in groups of 32 of columns in any order",
    ),
    "shuffled columns": (
        to_packed(4, 32, shuffled=True),
        compressed_config("pack-quantized", 4, 32, actorder="group"),
        "int4 in groups of 32 of columns in any order",
    ),
    "int8 with zero points": (
        to_int8(0, symmetric=False),
        compressed_config("int-quantized", 8, 0, symmetric=False),
        "int8 by rows with zero points",
    ),
    "fp8": (to_float8((1, 0)), {"quant_method": "fbgemm_fp8"}, "F8_E4M3"),
}


@pytest.fixture
def save(tmp_path: Path, save_model: Any) -> Any:
    """``save(quantize, settings, family, ...)``: a small random checkpoint, quantized and plain."""

    def write(quantize: Quantize, settings: dict[str, Any], family: str = "Llama", **changes: Any) -> QuantizedPair:
        save_model(tmp_path / "it", family, **(SIZES | changes))
        return quantize_folder(tmp_path / "it", quantize, settings)

    return write


def part_of(path: Path, sizes: ParallelSizes, rank: int) -> Decoder:
    """The part of one of several ranks, which can't compute."""
    ranks = SingleRank()
    ranks.position = sizes.position(rank)
    return load_model(path, dtype="float32", quantized_weights="keep", ranks=ranks)


def keep(path: Path, dtype: str = "float32") -> Decoder:
    return load_model(path, dtype=dtype, quantized_weights="keep")


def quantized_linears(decoder: Decoder) -> list[QuantizedLinear]:
    return [module for module in decoder.layers.modules() if isinstance(module, QuantizedLinear)]


@torch.inference_mode()
def logits(decoder: Decoder, *chunks: list[int]) -> torch.Tensor:
    requests = PagedRequests(decoder, num_blocks=16)
    return torch.cat([requests.forward({"it": chunk})["it"] for chunk in chunks])


@pytest.mark.parametrize("name", KEPT)
def test_a_model_stays_quantized_and_has_nearly_the_logits_of_its_weights(
    name: str, save: Any, caplog: pytest.LogCaptureFixture
) -> None:
    quantize, settings, kind = KEPT[name]
    pair = save(quantize, settings)
    with caplog.at_level(logging.INFO):
        kept = keep(pair.quantized)
    assert f"matrices that stay quantized: 14 {kind}; expanded: 2 F32" in caplog.text
    assert len(quantized_linears(kept)) == 8
    for tensor, weights in pair.weights.items():
        step = weights.abs().max() / 8
        # Rounding scales and mins to float16 moves weights by up to 15 / 4096 of a step.
        torch.testing.assert_close(kept.destinations()[tensor].double(), weights, atol=float(step / 250), rtol=1e-3)
    made, exact = logits(kept, TOKENS), logits(load_model(pair.plain, dtype="float32"), TOKENS)
    errors = (made - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0.0 < float(errors.max()) < 0.03
    assert torch.equal(logits(kept, TOKENS[:7], TOKENS[7:8], TOKENS[8:]), made)


@pytest.mark.parametrize("name", ["int4, groups of 32", "gptq", "int8 in words"])
def test_scales_of_16_bits_without_zero_points_are_exact(name: str, save: Any) -> None:
    quantize, settings, _ = KEPT[name]
    pair = save(quantize, settings)
    kept = keep(pair.quantized).destinations()
    assert all(torch.equal(kept[tensor].double(), weights) for tensor, weights in pair.weights.items())


@pytest.mark.parametrize("name", EXPANDED)
def test_what_does_not_fit_is_expanded_and_logged(name: str, save: Any, caplog: pytest.LogCaptureFixture) -> None:
    quantize, settings, kind = EXPANDED[name]
    pair = save(quantize, settings)
    with caplog.at_level(logging.INFO):
        decoder = keep(pair.quantized)
    assert f"matrices that stay quantized: none; expanded: 2 F32, 14 {kind}" in caplog.text
    assert torch.equal(logits(decoder, TOKENS), logits(load_model(pair.plain, dtype="float32"), TOKENS))


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_plan_of_the_memory_has_the_bytes_in_memory(family: str, tensor: int, save: Any) -> None:
    quantize, settings, _ = KEPT["awq"] if family == "Qwen3Moe" else KEPT["int8, rows"]
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    pair = save(quantize, settings, family, **(experts if family == "Qwen3Moe" else DEEPSEEK))
    decoder, source = keep(pair.quantized), inspect_checkpoint(pair.quantized).source
    kept = kept_weights(Shard(decoder.config, RankPosition(sizes=ParallelSizes(tensor))), source, KeptKind.INTEGERS)
    matrices = {matrix: None for linear in quantized_linears(decoder) for matrix in linear.matrices}
    assert kept.num_bytes == sum(matrix.num_bytes for matrix in matrices)
    assert kept.parameters == sum(matrix.rows * matrix.columns for matrix in matrices)
    assert 0 < kept.expert_parameters < kept.parameters
    made, exact = logits(decoder, TOKENS), logits(load_model(pair.plain, dtype="float32"), TOKENS)
    errors = (made - exact).norm(dim=-1) / exact.norm(dim=-1)
    # Where two experts are nearly equal, the rounding may choose the other one.
    assert (errors < 0.03).float().mean() > 0.7


@pytest.mark.parametrize("left_out", ["q_a_proj", "kv_a_proj_with_mqa"])
def test_the_projections_to_latents_stay_quantized_if_both_are(left_out: str, save: Any) -> None:
    quantize, settings, _ = KEPT["int8, rows"]
    pair = save(quantize, settings, "DeepseekV3", **DEEPSEEK)
    whole = keep(pair.quantized)
    assert isinstance(whole.layers[0].attention.down, QuantizedLinear)
    leave_out(pair, left_out)
    decoder, source = keep(pair.quantized), inspect_checkpoint(pair.quantized).source
    assert not any(isinstance(layer.attention.down, QuantizedLinear) for layer in decoder.layers)
    assert len(quantized_linears(decoder)) == len(quantized_linears(whole)) - 2
    matrices = {matrix: None for linear in quantized_linears(decoder) for matrix in linear.matrices}
    kept = kept_weights(Shard(decoder.config), source, KeptKind.INTEGERS)
    assert kept.num_bytes == sum(matrix.num_bytes for matrix in matrices)
    plain = load_model(pair.plain, dtype="float32").destinations()
    name = f"model.layers.0.self_attn.{left_out}.weight"
    assert torch.equal(decoder.destinations()[name], plain[name])


def leave_out(pair: QuantizedPair, module: str) -> None:
    """Put the plain matrices of these modules in the place of the quantized ones."""
    path = pair.quantized / "model.safetensors"
    plain = load_file(pair.plain / "model.safetensors")
    tensors = {name: each for name, each in load_file(path).items() if f".{module}." not in name}
    save_file(tensors | {name: each for name, each in plain.items() if f".{module}." in name}, path)


@pytest.mark.parametrize(("value_dim", "is_kept"), [(32, True), (24, False)])
def test_the_plan_knows_what_ranks_keep_of_recurrent_layers(value_dim: int, is_kept: bool, save: Any) -> None:
    quantize, settings, _ = KEPT["int4, groups of 32"]
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": value_dim, "ssm_state_size": 16, "n_groups": 2}
    path = save(quantize, settings, "NemotronH", layers_block_type=["mamba", "attention"], **mamba).quantized
    parts = [part_of(path, ParallelSizes(tensor=2), rank) for rank in range(2)]
    assert [isinstance(part.layers[0].mixer.output, QuantizedLinear) for part in parts] == [is_kept] * 2
    matrices = [matrix for part in parts for linear in quantized_linears(part) for matrix in linear.matrices]
    matrices += [part.embedding.quantized for part in parts]
    kept = kept_weights(parts[0].shard, inspect_checkpoint(path).source, KeptKind.INTEGERS)
    assert kept.parameters == sum(matrix.rows * matrix.columns for matrix in matrices)


@torch.inference_mode()
@pytest.mark.parametrize("left_out", ["", "in_proj_z", "in_proj_b"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_inputs_of_gated_delta_layers_stay_quantized_if_all_parts_are(ranks: int, left_out: str, save: Any) -> None:
    quantize, settings, _ = KEPT["int4, groups of 32"]
    pair = save(quantize, settings, "Qwen3_5", **DELTA)
    if left_out:
        leave_out(pair, left_out)
    parts = [part_of(pair.quantized, ParallelSizes(tensor=ranks), rank) for rank in range(ranks)]
    for part in parts:
        layer = part.layers[0].attention
        assert isinstance(layer.inputs, QuantizedLinear) == (left_out != "in_proj_z")
        assert isinstance(layer.gates, QuantizedLinear) == (left_out != "in_proj_b")
    matrices = {matrix: None for part in parts for linear in quantized_linears(part) for matrix in linear.matrices}
    parameters = sum(matrix.rows * matrix.columns for matrix in matrices)
    source = inspect_checkpoint(pair.quantized).source
    assert kept_weights(parts[0].shard, source, KeptKind.INTEGERS).parameters == parameters
    if ranks == 1:
        weights, plain = parts[0].destinations(), load_model(pair.plain, dtype="float32")
        assert all(torch.equal(weights[name], expected) for name, expected in plain.destinations().items())
        hidden = torch.randn(7, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
        for linear in ("inputs", "gates"):
            made, exact = (getattr(model.layers[0].attention, linear)(hidden) for model in (parts[0], plain))
            assert float((made - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("name", ["int4, groups of 32", "awq"])
def test_ranks_divide_quantized_matrices(name: str, save: Any) -> None:
    quantize, settings, _ = KEPT[name]
    pair, sizes = save(quantize, settings), ParallelSizes(tensor=2)
    whole = keep(pair.quantized).destinations()
    first, second = run_ranks(model_scenarios.answer_quantized, 2, sizes, free_port(), pair.quantized)
    assert {said["quantized"] for said in (first, second)} == {"QuantizedLinear"}
    for tensor, weights in whole.items():
        dim = 1 if tensor.endswith(("o_proj.weight", "down_proj.weight")) else 0
        parts = [said["weights"][tensor] for said in (first, second)]
        assert torch.equal(parts[0] if weights.dim() == 1 else torch.cat(parts, dim), weights), tensor
    assert first["answers"].tokens == first["brought back"].tokens == second["answers"].tokens


def test_a_quantized_head_stays_so(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path / "it", "Llama", **(SIZES | {"vocab_size": 72}))
    pair = quantize_folder(tmp_path / "it", to_gptq(4, 64), gptq_config(4, 64, lm_head=True), also=("lm_head.weight",))
    decoder = keep(pair.quantized)
    assert isinstance(decoder.head._packed, QuantizedLinear)
    assert torch.equal(decoder.destinations()["lm_head.weight"].double(), pair.weights["lm_head.weight"])
    made, exact = logits(decoder, TOKENS), logits(load_model(pair.plain, dtype="float32"), TOKENS)
    assert float(((made - exact).norm(dim=-1) / exact.norm(dim=-1)).max()) < 0.03


def test_a_router_is_expanded(tmp_path: Path, save_model: Any) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    save_model(tmp_path / "it", "Qwen3Moe", **(SIZES | experts))
    pair = quantize_folder(tmp_path / "it", to_gptq(4, 64), gptq_config(4, 64), also=("mlp.gate.weight",))
    decoder, source = keep(pair.quantized), inspect_checkpoint(pair.quantized).source
    router = decoder.layers[0].feed_forward.router.linear
    assert torch.equal(router.weight.double(), pair.weights["model.layers.0.mlp.gate.weight"])
    assert not isinstance(router, QuantizedLinear)
    matrices = {matrix: None for linear in quantized_linears(decoder) for matrix in linear.matrices}
    kept = kept_weights(Shard(decoder.config), source, KeptKind.INTEGERS)
    assert kept.num_bytes == sum(matrix.num_bytes for matrix in matrices)


def test_released_weights_stay_quantized(save: Any) -> None:
    quantize, settings, _ = KEPT["int8, rows"]
    decoder = keep(save(quantize, settings).quantized, "bfloat16")
    expected = logits(decoder, TOKENS)
    offload_weights(decoder)
    restore_weights(decoder, CPU)
    assert len(quantized_linears(decoder)) == 8
    assert torch.equal(logits(decoder, TOKENS), expected)


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"qzeros": torch.full((2, 48), 0x76777777)}, "has zero points other than 8, but the configuration says"),
        ({"g_idx": torch.arange(256).flip(0) % 2}, "has groups of columns that aren't consecutive, but"),
        ({"scales": torch.full((2, 384), 1e6)}, "has scales that float16 can't represent"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_codes_that_contradict_the_settings_are_refused(change: dict[str, Any], said: str, save: Any) -> None:
    quantize, settings, _ = KEPT["gptq"]
    pair = save(quantize, settings)
    path = pair.quantized / "model.safetensors"
    changed = {f"{UP}.{key}": each if key == "scales" else each.int() for key, each in change.items()}
    save_file(load_file(path) | changed, path)
    with pytest.raises(CheckpointError, match=rf"up_proj\.weight {said}.*Use --quantized-weights expand"):
        keep(pair.quantized)
    load_model(pair.quantized, dtype="float32")
