"""Products of a fixed number of rows, so that the bits of a request do not depend on its batch on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_support.pretended import pretended_device
from gpu_support.small_engine import LATENTS, generate, on_gpu, random_decoder, small_engine
from torch import Tensor

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine import batch_invariance
from megatron_runtime.engine.graph_sizes import decode_sizes, prompt_sizes
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model import products
from megatron_runtime.model.products import linear

ROWS = 4


@pytest.fixture
def rows_of_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each product."""
    seen: list[int] = []
    multiply = products.functional.linear

    def counted(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(inputs.numel() // inputs.shape[-1])
        return multiply(inputs, weight, bias)

    monkeypatch.setattr(products.functional, "linear", counted)
    return seen


@pytest.mark.parametrize("biased", [False, True])
def test_every_product_has_the_fixed_number_of_rows(rows_of_products: list[int], biased: bool) -> None:
    inputs, weight, bias = torch.randn(11, 6), torch.randn(5, 6), torch.randn(5) if biased else None
    found = linear(inputs, weight, bias, ROWS)
    assert rows_of_products == [ROWS, ROWS, ROWS]
    assert torch.allclose(found, linear(inputs, weight, bias, None), atol=1e-5)
    assert torch.equal(linear(inputs[8:9], weight, bias, ROWS), found[8:9])
    assert linear(inputs.view(1, 11, 6), weight, bias, ROWS).shape == (1, 11, 5)


@pytest.mark.usefixtures("device_guard")
@pytest.mark.parametrize("num_cuda_graphs", [0, -1])
def test_all_products_of_the_engine_have_fixed_rows(
    monkeypatch: pytest.MonkeyPatch, rows_of_products: list[int], num_cuda_graphs: int
) -> None:
    model = random_decoder()
    expected = generate(small_engine(model), {}, lengths=(4, 3))
    for module in ("model.products", "engine.graph_sizes"):
        monkeypatch.setattr(f"megatron_runtime.{module}.FIXED_ROWS", ROWS)
    rows_of_products.clear()
    with pretended_device() as device:
        engine = small_engine(
            on_gpu(model),
            batch_invariant=True,
            num_cuda_graphs=num_cuda_graphs,
            cuda_graph_max_tokens=14,
            use_cuda_graphs_for_non_decode_steps=True,
        )
        assert generate(engine, {}, lengths=(4, 3)) == expected
    assert set(rows_of_products) == {ROWS}
    assert (device.work.replays > 0) == (num_cuda_graphs == -1)


@pytest.mark.usefixtures("device_guard")
def test_the_products_with_the_matrices_of_heads_have_fixed_tiles(
    monkeypatch: pytest.MonkeyPatch, rows_of_products: list[int]
) -> None:
    """In a model with latent attention: kernels whose tiles no batch changes compute them, and no library."""
    model = random_decoder(num_layers=1, **LATENTS)
    expected = generate(small_engine(model), {}, lengths=(2, 2))
    for module in ("model.products", "engine.graph_sizes"):
        monkeypatch.setattr(f"megatron_runtime.{module}.FIXED_ROWS", ROWS)
    rows_of_products.clear()
    with pretended_device() as device, monkeypatch.context() as patch:
        patch.setattr(torch, "baddbmm", None)
        engine = small_engine(on_gpu(model), batch_invariant=True)
        device.work.variants.clear()
        assert generate(engine, {}, lengths=(2, 2)) == expected
    assert set(rows_of_products) == {ROWS}
    tiles = {
        (given[0], *(item for item in given if item[0].startswith("BLOCK_")))
        for given in device.work.variants
        if given[0] in ("absorb_and_store", "merge_and_expand")
    }
    assert len(tiles) == 2


@pytest.mark.usefixtures("device_guard")
def test_a_model_that_depends_on_its_batch_nevertheless_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "has_gpu_attention", lambda _: False)
    with (
        pretended_device(),
        pytest.raises(ConfigurationError, match=r"^batch_invariant=True: the attention") as refusal,
    ):
        small_engine(on_gpu(random_decoder()), batch_invariant=True)
    assert refusal.value.field == "batch_invariant"


def test_a_cpu_changes_nothing() -> None:
    engine = small_engine(random_decoder(), batch_invariant=True)
    assert all(getattr(module, "rows_together", None) is None for module in engine.controller.model.modules())


def test_graphs_have_a_multiple_of_the_fixed_rows() -> None:
    config = InferenceConfig(num_cuda_graphs=-1, batch_invariant=True)
    assert decode_sizes(config, 300) == [128, 256, 384]
    assert prompt_sizes(config, [128, 256], 300) == [(128, 127), (256, 128), (256, 255), (384, 128), (384, 256)]
