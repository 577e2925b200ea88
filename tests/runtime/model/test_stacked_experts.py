"""Experts that a file stores in one tensor, plain or in MXFP4, have the weights that transformers reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.reference_models import CLOSE, logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model, open_checkpoint
from megatron_runtime.model.refit import update_weights

FILE = "model.safetensors"
QWEN_3_5 = {
    "std": 0.1,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
GPT_OSS = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2}


def pack(folder: Path, model: Any) -> None:
    """Give the experts of ``model`` random values of MXFP4, and store them packed in its file, as OpenAI does."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            experts, columns, rows = parameter.shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
            parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, save_model: Any) -> tuple[Path, Any]:
    """A packed checkpoint, and its model."""
    folder = tmp_path_factory.mktemp("packed")
    model = save_model(folder, "GptOss", **GPT_OSS)
    pack(folder, model)
    return folder, model


def test_packed_experts_are_those_of_transformers(packed: tuple[Path, Any], paged_requests: Any) -> None:
    folder, model = packed
    tokens = list(range(1, 40))
    ours = paged_requests(load_model(folder, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)


def test_the_configuration_may_name_the_format(packed: tuple[Path, Any], tmp_path: Path) -> None:
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((packed[0] / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(packed[0] / "model.safetensors")
    ours, expected = (load_model(path, dtype="float32").destinations() for path in (tmp_path, packed[0]))
    assert all(torch.equal(ours[name], weights) for name, weights in expected.items())


def test_every_part_of_a_packed_matrix_can_be_read(packed: tuple[Path, Any]) -> None:
    folder, model = packed
    _, source, _ = open_checkpoint(folder)
    experts = model.model.layers[1].mlp.experts
    matrices = {
        "gate_proj": experts.gate_up_proj[2, :, ::2].T,
        "up_proj": experts.gate_up_proj[2, :, 1::2].T,
        "down_proj": experts.down_proj[2].T,
    }
    for name, matrix in matrices.items():
        for rows, columns in (
            (slice(0, 32), slice(0, 32)),
            (slice(5, 18), slice(7, 20)),
            (slice(31, 32), slice(31, 32)),
        ):
            into = torch.empty(matrix[rows, columns].shape)
            counted = sum(source.read(f"model.layers.1.mlp.experts.2.{name}.weight", into, (rows.start, columns.start)))
            assert counted == into.numel()
            assert torch.equal(into, matrix[rows, columns])


def test_the_summary_counts_stored_bytes_and_loaded_elements(packed: tuple[Path, Any]) -> None:
    folder, model = packed
    summary = inspect_checkpoint(folder)
    assert summary.num_parameters == model.num_parameters()
    assert summary.weight_bytes == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def test_stacked_experts_can_be_replaced_under_the_names_of_the_file(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "GptOss", **GPT_OSS)
    decoder = load_model(tmp_path, dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj"] *= 2.0
    update_weights(decoder, tensors)
    expected: Tensor = tensors["model.layers.0.mlp.experts.down_proj"][1].T
    assert torch.equal(decoder.destinations()["model.layers.0.mlp.experts.1.down_proj.weight"], expected)


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory, save_model: Any) -> tuple[Path, Any]:
    """A Qwen3.5 whose file has the tensors of transformers' modules, as the published ones, and its model."""
    folder = tmp_path_factory.mktemp("stacked")
    model = save_model(folder, "Qwen3_5Moe", **QWEN_3_5)
    save_file({name: parameter.detach().clone() for name, parameter in model.named_parameters()}, folder / FILE)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / FILE)
    return folder, model


def test_stacked_experts_of_whole_rows_are_those_of_transformers(
    stacked: tuple[Path, Any], tmp_path: Path, paged_requests: Any
) -> None:
    folder, model = stacked
    tokens = list(range(1, 40))
    decoder = load_model(folder, dtype="float32")
    ours = paged_requests(decoder).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)
    model.save_pretrained(tmp_path)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in load_file(tmp_path / FILE)
    single = load_model(tmp_path, dtype="float32").destinations()
    assert all(torch.equal(weights, single[name]) for name, weights in decoder.destinations().items())


def test_every_part_of_a_stacked_matrix_of_whole_rows_can_be_read(stacked: tuple[Path, Any]) -> None:
    folder, model = stacked
    _, source, _ = open_checkpoint(folder)
    experts = model.model.layers[1].mlp.experts
    gates, values = experts.gate_up_proj[2].chunk(2)
    for name, matrix in (("gate_proj", gates), ("up_proj", values), ("down_proj", experts.down_proj[2])):
        stored = f"model.layers.1.mlp.experts.2.{name}.weight"
        assert source.tensors[stored].shape == tuple(matrix.shape)
        for rows, columns in ((slice(None), slice(None)), (slice(5, 13), slice(7, 15)), (slice(15, 16), slice(0, 1))):
            into = torch.empty(matrix[rows, columns].shape)
            assert sum(source.read(stored, into, (rows.start or 0, columns.start or 0))) == into.numel()
            assert torch.equal(into, matrix[rows, columns])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_local_experts": 4}, "tensors: model.layers.0.mlp.experts.3.gate_proj.weight"),
        ({"intermediate_size": 64}, "has shape [32, 64], but the configuration expects [64, 64]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_stacked_experts_that_do_not_fit_the_configuration_are_named(
    config: dict[str, int], said: str, packed: tuple[Path, Any], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads((packed[0] / "config.json").read_text()) | config))
    (tmp_path / "model.safetensors").symlink_to(packed[0] / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(said)):
        inspect_checkpoint(tmp_path)
