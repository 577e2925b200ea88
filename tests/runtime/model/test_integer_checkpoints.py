"""Safetensors with matrices of int4 and int8 have the weights that the definitions of their formats give."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import model_scenarios
from runtime_support.quantized_safetensors import (
    LLAMA,
    Quantize,
    QuantizedPair,
    assert_same_weights,
    compressed_config,
    edit_tensors,
    gptq_config,
    quantize_folder,
    to_awq,
    to_gptq,
    to_int8,
    to_packed,
)
from runtime_support.rank_processes import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from suite_support.worker import free_port

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model, open_checkpoint
from megatron_runtime.parallel.layout import ParallelSizes

SQUARE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 1,
}
"""All matrices have one shape."""
WRITTEN_BY_LIBRARIES = Path(__file__).parent.parent / "data" / "quantized"
EXPERTS = LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "biases": ("Qwen2", LLAMA),
    "experts": ("Qwen3Moe", EXPERTS),
}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
KINDS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "packed int4, groups": (to_packed(4, 32), compressed_config("pack-quantized", 4, 32)),
    "packed int4, rows": (to_packed(4, 0, dtype=torch.float16), compressed_config("pack-quantized", 4, 0)),
    "packed int4 with zero points": (
        to_packed(4, 32, symmetric=False),
        compressed_config("pack-quantized", 4, 32, symmetric=False),
    ),
    "packed int4 with zero points that are not packed": (
        to_packed(4, 32, symmetric=False, packs_zeros=False),
        compressed_config("pack-quantized", 4, 32, symmetric=False),
    ),
    "packed int4, shuffled groups": (
        to_packed(4, 32, symmetric=False, shuffled=True),
        compressed_config("pack-quantized", 4, 32, symmetric=False, actorder="group"),
    ),
    "packed int8, groups": (to_packed(8, 16), compressed_config("pack-quantized", 8, 16)),
    "packed int8 with zero points": (
        to_packed(8, 0, symmetric=False),
        compressed_config("pack-quantized", 8, 0, symmetric=False),
    ),
    "int8, rows": (to_int8(0), compressed_config("int-quantized", 8, 0, dynamic=False)),
    "int8, groups with zero points": (
        to_int8(32, symmetric=False, dtype=torch.bfloat16),
        compressed_config("int-quantized", 8, 32, symmetric=False),
    ),
    "gptq int4": (to_gptq(4, 32), gptq_config(4, 32)),
    "gptq int4, version 2": (
        to_gptq(4, 32, symmetric=False, version=2),
        gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"),
    ),
    "gptq int4 with zero points": (to_gptq(4, 16, symmetric=False), gptq_config(4, 16, sym=False)),
    "gptq int4, shuffled groups": (to_gptq(4, 32, symmetric=False, shuffled=True), gptq_config(4, 32, desc_act=True)),
    "gptq int4, rows": (to_gptq(4, 0, has_index=False), gptq_config(4, -1)),
    "gptq int8": (to_gptq(8, 32, symmetric=False), gptq_config(8, 32, sym=False)),
    "gptq int8, version 2": (to_gptq(8, 0, version=2), gptq_config(8, -1, checkpoint_format="gptq_v2")),
    "awq": (to_awq(32), AWQ),
    "awq, rows": (to_awq(0), AWQ | {"group_size": -1}),
}


@pytest.fixture
def save(tmp_path: Path, save_model: Any) -> Any:
    """``save(family, kind)``: a small random checkpoint, quantized and plain."""

    def write(family: str, kind: str, **options: Any) -> QuantizedPair:
        name, sizes = FAMILIES[family]
        folder = tmp_path / f"{family}, {kind}"
        save_model(folder, name, **sizes)
        return quantize_folder(folder, *KINDS[kind], **options)

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_have_the_weights_of_the_definition(kind: str, save: Any) -> None:
    assert_same_weights(save("llama", kind))


@pytest.mark.parametrize("kind", ["packed int4 with zero points", "int8, rows", "gptq int4, shuffled groups", "awq"])
@pytest.mark.parametrize("family", ["biases", "experts"])
def test_biases_experts_and_other_types_too(kind: str, family: str, save: Any) -> None:
    assert_same_weights(save(family, kind, files=2), "bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_a_matrix_can_be_read(kind: str, save: Any) -> None:
    pair = save("llama", kind)
    _, source, _ = open_checkpoint(pair.quantized)
    name = "model.layers.1.mlp.down_proj.weight"
    matrix = pair.weights[name].float()
    for rows, columns in (((0, 96), (0, 160)), ((3, 90), (31, 103)), ((64, 67), (17, 18)), ((95, 96), (5, 160))):
        into = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
        assert sum(source.read(name, into, (rows[0], columns[0]))) == into.numel()
        assert torch.equal(into, matrix[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("kind", ["packed int4, shuffled groups", "gptq int4 with zero points", "awq"])
def test_ranks_divide_words_and_groups(kind: str, save: Any) -> None:
    pair, sizes = save("experts", kind), ParallelSizes(tensor=4, expert=2)
    for quantized, plain in run_ranks(
        model_scenarios.answer_all, 4, sizes, free_port(), [(pair.quantized, 4), (pair.plain, 4)]
    ):
        assert quantized.tokens == plain.tokens
        assert quantized.logits is None or torch.equal(quantized.logits, plain.logits)


@pytest.mark.parametrize("name", sorted(path.stem for path in WRITTEN_BY_LIBRARIES.glob("*.safetensors")))
def test_matrices_that_libraries_wrote_have_their_weights(name: str, tmp_path: Path, save_model: Any) -> None:
    with safe_open(WRITTEN_BY_LIBRARIES / f"{name}.safetensors", "pt") as file:
        settings = json.loads(file.metadata()["quantization_config"])
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    expected = stored.pop("expected")
    save_model(tmp_path / "it", "Llama", **SQUARE)
    pair = quantize_folder(tmp_path / "it", lambda _: (stored, expected.double()), settings)
    assert_same_weights(pair)


def test_a_row_may_end_within_a_word(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path / "it", "Llama", **(LLAMA | {"intermediate_size": 99}))
    pair = quantize_folder(tmp_path / "it", to_packed(4, 0), compressed_config("pack-quantized", 4, 0))
    assert_same_weights(pair)


def test_biases_of_zeros_that_the_configuration_does_not_have_are_ignored(save: Any) -> None:
    pair = save("llama", "gptq int4")
    edit_tensors(pair, {"model.layers.1.mlp.up_proj.bias": torch.zeros(160)})
    assert_same_weights(pair)
    edit_tensors(pair, {"model.layers.1.mlp.up_proj.bias": torch.full((160,), 0.5)})
    with pytest.raises(CheckpointError, match=r"up_proj\.bias isn't zero, but the configuration has no such bias"):
        load_model(pair.quantized)


def test_the_summary_counts_stored_bytes(save: Any) -> None:
    for kind in ("packed int4, shuffled groups", "gptq int4", "awq"):
        pair = save("llama", kind)
        summary = inspect_checkpoint(pair.quantized)
        assert summary.weight_bytes == sum(
            each.nbytes for each in load_file(pair.quantized / "model.safetensors").values()
        )
        assert summary.num_parameters == inspect_checkpoint(pair.plain).num_parameters


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("gptq int4", {f"{UP}.scales": None}, f"tensor {UP}.scales missing, which a quantized matrix needs"),
        ("gptq int4", {f"{UP}.qweight": None}, f"tensor {UP}.qweight missing"),
        ("gptq int4", {f"{UP}.scales": torch.ones(2, 160).half()}, "quantization_config.group_size requires [3, 160]"),
        ("gptq int4", {f"{UP}.qzeros": torch.ones(3, 20)}, f"tensor {UP}.qzeros has type F32, expected one of I32"),
        (
            "gptq int4",
            {f"{UP}.g_idx": torch.zeros(9).int()},
            "has shape [9], but quantization_config.bits requires [96]",
        ),
        (
            "gptq int4",
            {f"{UP}.qweight": torch.zeros(4).int()},
            "qweight has shape [4], but quantized matrices have two",
        ),
        ("awq", {f"{UP}.qzeros": torch.ones(1, 20).int()}, "quantization_config.group_size requires [3, 20]"),
        ("awq", {f"{UP}.qweight": torch.ones(96, 19).int()}, "quantization_config.group_size requires [3, 152]"),
        ("packed int4, groups", {f"{UP}.weight_packed": torch.ones(160, 12)}, "has type F32, expected one of I32"),
        (
            "packed int4, groups",
            {f"{UP}.weight_scale": torch.ones(160, 2)},
            "has shape [160, 2], but quantization_config.config_groups.group_0.weights.group_size requires [160, 3]",
        ),
        ("packed int4 with zero points", {f"{UP}.weight_zero_point": None}, f"tensor {UP}.weight_zero_point missing"),
        ("packed int4 with zero points", {f"{UP}.weight_zero_point": torch.ones(3, 3).int()}, "requires [20, 3]"),
        ("packed int4, shuffled groups", {f"{UP}.weight_g_idx": torch.ones(3).int()}, "the number of columns requires"),
        ("packed int4, shuffled groups", {f"{UP}.weight_g_idx": None}, f"tensor {UP}.weight_g_idx missing"),
        ("gptq int4, shuffled groups", {f"{UP}.g_idx": None}, f"tensor {UP}.g_idx missing"),
        (
            "int8, rows",
            {f"{UP}.weight_scale": torch.ones(7, 1)},
            "expected one number for all weights, or one for each",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:50],
)
def test_tensors_that_do_not_fit_are_named(kind: str, change: dict[str, Any], said: str, save: Any) -> None:
    pair = save("llama", kind)
    edit_tensors(pair, change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        inspect_checkpoint(pair.quantized)


@pytest.mark.parametrize(("kind", "name"), [("gptq int4", "g_idx"), ("packed int4, shuffled groups", "weight_g_idx")])
def test_groups_that_do_not_exist_are_named(kind: str, name: str, save: Any) -> None:
    pair = save("llama", kind)
    edit_tensors(pair, {f"{UP}.{name}": torch.arange(96).int() // 24})
    with pytest.raises(CheckpointError, match=rf"up_proj\.{name} has numbers from 0 to 3 for 3 groups"):
        load_model(pair.quantized)


def test_an_unused_index_means_consecutive_groups(save: Any) -> None:
    pair = save("llama", "packed int4, groups")
    edit_tensors(pair, {f"{UP}.weight_g_idx": torch.full((96,), -1, dtype=torch.int32)})
    assert_same_weights(pair)
