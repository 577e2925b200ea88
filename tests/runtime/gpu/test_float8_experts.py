"""Mixtures of experts with matrices in fp8: kernels against float64, and the engine on a pretended GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support.float8_mixture import Float8Mixture
from gpu_support.mixture import MixtureCase
from gpu_support.pretended import Work, pretended_device
from gpu_support.small_engine import generate, small_engine
from runtime_support.quantized_safetensors import quantize_folder, to_float8
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.formats.quantized_weights import KeptKind
from megatron_runtime.model.quantized.float8_linear import Float8Linear
from megatron_runtime.model.quantized.kept_tensors import kept_weights
from megatron_runtime.model.shard import Shard

LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3}
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "one token, scales of rows": ({"tokens": 1, "experts": (8, 2), "sizes": (32, 64)}, None),
    "biases, groups": ({"tokens": 5, "experts": (6, 3), "sizes": (96, 40), "is_biased": True}, 32),
    "experts elsewhere, no gate": (
        {"tokens": 20, "experts": (3, 2), "sizes": (72, 40), "elsewhere": 2}
        | {"is_gated": False, "activation": "relu_squared"},
        32,
    ),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_equal_those_of_float64(
    name: str, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_runtime.gpu.launch._capability", lambda _: capability)
    options, group = CASES[name]
    mixture = Float8Mixture.of(MixtureCase.random(**options, dtype=dtype), group)
    found, expected = mixture.process(16), mixture.case.expected()
    assert (found.double() - expected).norm() <= LIMITS[dtype] * expected.norm()


@pytest.mark.usefixtures("exact_products")
def test_the_bits_of_a_token_do_not_depend_on_other_tokens() -> None:
    mixture = Float8Mixture.of(MixtureCase.random(70, (3, 2), (64, 24), torch.float32), 32)
    for tile_rows in (16, 64):
        found = mixture.process(tile_rows)
        for at in (0, 69):
            assert torch.equal(mixture.rows(at, at + 1).process(tile_rows)[0], found[at])


@pytest.mark.usefixtures("device_guard")
def test_the_engine_gives_the_tokens_of_the_expanded_experts(tmp_path: Path) -> None:
    """On CUDA graphs, with the memory of the plan, and no kernel compiled later."""
    blocks = to_float8((32, 32), name="weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [32, 32]}
    pair, lengths = quantize_folder(write_tiny_checkpoint(tmp_path / "plain", experts=4, layers=1), *blocks), (3, 4)
    expected = generate(small_engine(load_model(pair.plain, dtype="float32")), {}, lengths=lengths)
    with pretended_device() as device:
        model = load_model(pair.quantized, dtype="float32", device="cuda", quantized_weights="keep")
        linears = [each for each in model.modules() if isinstance(each, Float8Linear)]
        assert len(linears) == 2 + 2 * 4
        model.prepare_kernels(16)
        compiled, device.work = device.work.variants, Work()
        engine = small_engine(model, num_cuda_graphs=1)
        assert generate(engine, {}, lengths=lengths) == expected
        assert device.work.replays > 0
    of_experts = {variant for variant in device.work.variants if "visits" in variant[0]}
    assert of_experts <= compiled
    kept = kept_weights(Shard(model.config), inspect_checkpoint(pair.quantized).source, KeptKind.FLOAT8)
    assert kept.num_bytes == sum(each.codes.nbytes + each.scales.nbytes for each in linears)
    assert kept.expert_parameters == sum(each.codes.numel() for each in linears[2:])
