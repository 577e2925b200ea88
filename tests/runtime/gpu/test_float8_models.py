"""Models whose matrices stay in fp8, on a pretended GPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support.pretended import Work, pretended_device
from gpu_support.small_engine import generate, small_engine
from runtime_support.quantized_safetensors import QuantizedPair, quantize_folder, to_float8
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from safetensors.torch import load_file, save_file

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.formats.quantized_weights import KeptKind
from megatron_runtime.model.quantized.float8_linear import Float8Linear
from megatron_runtime.model.quantized.kept_tensors import kept_weights
from megatron_runtime.model.refit import offload_weights, restore_weights, update_weights
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition
from megatron_runtime.parallel.single_rank import SingleRank
from megatron_runtime.sampling_params import SamplingParams

BLOCKS = to_float8((32, 32), name="weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [32, 32]}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "blocks": BLOCKS,
    "one scale": (to_float8(scale_shape=()), {"quant_method": "fp8", "activation_scheme": "static"}),
    "rows": (to_float8((1, 0)), {"quant_method": "fbgemm_fp8"}),
    "large blocks": (to_float8((64, 64)), {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    "other bits": (to_float8((1, 0), dtype=torch.float8_e5m2), {"quant_method": "fp8"}),
}
LAUNCHES_PER_LAYER = 9
LAUNCHES_AROUND_LAYERS = 6
CUDA = torch.device("cuda")

pytestmark = pytest.mark.usefixtures("device_guard")


def checkpoint(folder: Path, kind: str = "blocks", **changes: Any) -> QuantizedPair:
    """A tiny one, with the weights that it means beside it."""
    return quantize_folder(write_tiny_checkpoint(folder / "plain", **({"hidden": 64} | changes)), *KINDS[kind])


def keep(path: Path, **options: Any) -> Decoder:
    """On the GPU."""
    return load_model(path, dtype="float32", device="cuda", quantized_weights="keep", **options)


def linears_of(model: Decoder) -> list[Float8Linear]:
    """Those whose matrices stay in fp8."""
    return [module for module in model.modules() if isinstance(module, Float8Linear)]


def test_the_engine_gives_the_tokens_of_the_expanded_weights(tmp_path: Path) -> None:
    pair, lengths = checkpoint(tmp_path), (3, 4)
    expected = generate(small_engine(load_model(pair.plain, dtype="float32")), {}, lengths=lengths)
    with pretended_device() as device:
        model = keep(pair.quantized)
        assert len(linears_of(model)) == 8
        model.prepare_kernels(16)
        compiled, device.work = device.work.variants, Work()
        assert generate(small_engine(model, block_size_tokens=16), {}, lengths=lengths) == expected
    assert device.work.variants <= compiled, "a request would wait for the compiler"
    assert device.work.kernels["multiply_float8"] > 8


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_scales_stay(kind: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, kind, layers=1)
    with pretended_device():
        model = keep(pair.quantized)
        assert len(linears_of(model)) == 4
        found = {name: weight.cpu() for name, weight in model.destinations().items()}
    assert all(torch.equal(found[name], weight.float()) for name, weight in pair.weights.items())


def test_a_layer_has_as_many_launches_as_with_expanded_weights(tmp_path: Path) -> None:
    """And a step waits once, and copies from pinned memory alone."""
    pair = checkpoint(tmp_path)
    with pretended_device() as device:
        engine = small_engine(keep(pair.quantized), num_cuda_graphs=0)
        engine.add_request(0, [65] * 5, SamplingParams(temperature=0.0, num_tokens_to_generate=8))
        engine.step_modern()
        device.work = Work()
        engine.step_modern()
        assert device.work.kernels["multiply_float8"] == 8
        assert device.work.launches <= 2 * LAUNCHES_PER_LAYER + LAUNCHES_AROUND_LAYERS + 2
        assert (+device.work.copies, sum(device.work.waits.values())) == ({}, 1)


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_have_slices_of_codes_and_scales(tensor: int, tmp_path: Path) -> None:
    """Which mean the same weights, with the memory of the plan; also where ranks divide rows and columns within a
    block. The columns of one matrix are not divided between 32 of them, so that it is expanded on both."""
    pair = checkpoint(tmp_path, "large blocks", hidden=96, heads=6)
    whole = load_model(pair.plain, dtype="float32").destinations()
    parts: list[dict[str, torch.Tensor]] = []
    with pretended_device():
        for rank in range(tensor):
            ranks = SingleRank()
            ranks.position = ParallelSizes(tensor).position(rank)
            model = keep(pair.quantized, ranks=ranks)
            parts.append({name: weight.cpu() for name, weight in model.destinations().items()})
            found = [(each.codes.numel(), each.scales.nbytes) for each in linears_of(model)]
    assert len(found) == (8 if tensor == 1 else 6)
    for name, weight in whole.items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        together = parts[0][name] if weight.dim() == 1 else torch.cat([part[name] for part in parts], dim)
        assert torch.equal(together, weight), name
    shard = Shard(model.config, RankPosition(sizes=ParallelSizes(tensor)))
    kept = kept_weights(shard, inspect_checkpoint(pair.quantized).source, KeptKind.FLOAT8)
    assert kept.parameters == tensor * sum(codes for codes, _ in found)
    assert kept.num_bytes == tensor * sum(map(sum, found))


def test_weights_leave_the_gpu_and_come_back_and_are_replaced(tmp_path: Path) -> None:
    pair, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other", seed=4)
    with pretended_device():
        model = keep(pair.quantized)
        before = model.destinations()
        offload_weights(model)
        assert {each.device.type for each in model.parameters()} == {"cpu"}
        restore_weights(model, CUDA)
        assert all(torch.equal(weight, before[name]) for name, weight in model.destinations().items())
        memory = [each.data_ptr() for each in model.parameters()]
        update_weights(model, other.quantized)
        assert [each.data_ptr() for each in model.parameters()] == memory, "graphs have these addresses"
        found = {name: weight.cpu() for name, weight in model.destinations().items()}
        assert all(torch.equal(found[name], weight.float()) for name, weight in other.weights.items())
        with pytest.raises(CheckpointError, match=r"stay in fp8 .* use --quantized-weights expand"):
            update_weights(model, pair.plain)


def test_groups_of_few_columns_are_expanded_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = to_float8((16, 16), name="weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [16, 16]}
    pair = quantize_folder(write_tiny_checkpoint(tmp_path / "plain"), *small)
    with pretended_device(), caplog.at_level(logging.INFO):
        assert linears_of(keep(pair.quantized)) == []
    assert "matrices that stay quantized: none; expanded: 2 F32, 14 F8_E4M3" in caplog.text


def test_numbers_that_are_not_finite_are_reported(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path)
    tensors = load_file(pair.quantized / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, pair.quantized / "model.safetensors")
    wrong = r" 1 of the 8,448 numbers in tensor model\.layers\.1\.mlp\.down_proj\.weight are NaN or infinite as float8_"
    with pretended_device(), pytest.raises(CheckpointError, match=wrong):
        keep(pair.quantized, check_finite=True)


def test_a_tied_head_remains_that_of_the_embedding(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path)
    config = json.loads((pair.quantized / "config.json").read_text())
    (pair.quantized / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pretended_device():
        model = keep(pair.quantized)
        assert model.head is not None
        assert model.embedding is not None
        assert model.head.table is model.embedding.table
