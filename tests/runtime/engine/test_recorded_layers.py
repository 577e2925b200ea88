"""Passes of few rows repeat recorded calls of kernels, with the bits of the layers."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_support.random_llama import random_llama
from runtime_support.paged_requests import PagedRequests
from torch import Tensor, nn

from megatron_runtime.model import recorded_layers
from megatron_runtime.model.activations import MOST_RECORDED_ROWS
from megatron_runtime.model.config import ExpertsConfig, RoutingConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.recorded_layers import EXACT_ROWS, STEP, RecordedLayers
from megatron_runtime.model.refit import update_weights

FEATURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "windows": {"num_layers": 4, "layer_windows": (8, None, 8, None)},
    "unrotated": {"num_layers": 3, "unrotated_layers": frozenset({1})},
    "soft cap": {"attention_soft_cap": 5.0},
    "sinks": {"attention_sinks": True},
    "part of the channels": {"rotary_dim": 8},
    "norms of heads": {"query_key_norm": "head"},
}
COMPUTING: dict[str, dict[str, Any]] = {
    "norms of projections": {"query_key_norm": "projection"},
    "another norm": {"norm": "layer"},
    "gelu": {"activation": "gelu"},
    "experts": {"experts": ExpertsConfig(4, 2, 96, RoutingConfig("softmax"))},
}
"""Features that PyTorch computes, or NumPy."""


def made(dtype: torch.dtype = torch.float32, **changes: Any) -> Decoder:
    model = random_llama(hidden=64, intermediate=96, std=0.2, dtype=dtype, **changes)
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name or "query_norm" in name or "key_norm" in name:
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(5))
    model.prepare()
    return model


def recorded(model: Decoder) -> RecordedLayers:
    assert model.recorded_layers is not None
    return model.recorded_layers


def answers(requests: PagedRequests, passes: Sequence[dict[str, list[int]]]) -> list[Tensor]:
    return [torch.cat([*requests.forward(each).values()]) for each in passes]


def mixed_passes() -> list[dict[str, list[int]]]:
    """Prompts and single tokens of several requests; each number of rows is there many times."""
    chance = random.Random(0)
    passes = []
    for _ in range(40):
        names = chance.sample("abcde", chance.randint(1, 3))
        passes.append({name: [chance.randrange(256) for _ in range(chance.choice((1, 1, 1, 2, 7)))] for name in names})
    return passes


def without_recordings(model: Decoder, passes: Sequence[dict[str, list[int]]]) -> list[Tensor]:
    kept, model.recorded_layers = model.recorded_layers, None
    try:
        return answers(PagedRequests(model), passes)
    finally:
        model.recorded_layers = kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_a_repeated_pass_has_the_bits_of_the_layers(changes: dict[str, Any], dtype: torch.dtype) -> None:
    model, passes = made(dtype, **changes), mixed_passes()
    expected = without_recordings(model, passes)
    assert not recorded(model).num_repeated
    for one, other in zip(answers(PagedRequests(model), passes), expected, strict=True):
        assert torch.equal(one, other)
    assert (recorded(model).num_repeated > 10) == model.is_packed, "unpacked matrices are multiplied by PyTorch"


@pytest.mark.parametrize("changes", COMPUTING.values(), ids=COMPUTING)
def test_passes_that_are_not_kernels_alone_are_not_recorded(changes: dict[str, Any]) -> None:
    model, passes = made(**changes), mixed_passes()
    expected = without_recordings(model, passes)
    for one, other in zip(answers(PagedRequests(model), passes), expected, strict=True):
        assert torch.equal(one, other)
    assert not recorded(model).num_repeated


def test_each_cache_and_number_of_threads_has_its_recordings() -> None:
    model, passes = made(), mixed_passes()
    expected, threads = without_recordings(model, passes), torch.get_num_threads()
    several = [PagedRequests(model, num_blocks=64 + number, block_size_tokens=4 + number) for number in range(3)]
    try:
        for number, (given, wanted) in enumerate(zip(passes, expected, strict=True)):
            torch.set_num_threads(1 + number // 3 % 2)
            for requests in several:
                assert torch.equal(answers(requests, [given])[0], wanted)
    finally:
        torch.set_num_threads(threads)
    assert recorded(model).num_repeated > 10


def test_a_cache_that_was_released_and_restored_has_the_right_answers() -> None:
    model, passes = made(), mixed_passes()[:20]
    expected = without_recordings(model, passes)
    requests = PagedRequests(model)
    first = answers(requests, passes[:10])
    requests.cache.offload(range(requests.cache.num_blocks))
    blocker = KVCache(model.shard.cache_config, 512, 16, model.dtype)  # The memory may be elsewhere now.
    requests.cache.restore()
    for one, other in zip([*first, *answers(requests, passes[10:])], expected, strict=True):
        assert torch.equal(one, other)
    assert blocker.is_resident


def test_new_weights_are_used_and_old_ones_released() -> None:
    model, other = made(), random_llama(hidden=64, intermediate=96, std=0.3)
    names = {name: view.clone() for name, view in other.destinations().items()}
    other.prepare()
    passes = mixed_passes()
    expected = without_recordings(other, passes)
    answers(PagedRequests(model), passes)
    assert recorded(model).num_repeated
    gone = weakref.ref(recorded(model)), weakref.ref(model.layers[0].attention.qkv)
    gc.disable()
    try:
        update_weights(model, names)
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
    for one, wanted in zip(answers(PagedRequests(model), passes), expected, strict=True):
        assert torch.equal(one, wanted)
    assert recorded(model).num_repeated


def test_rows_with_adapters_call_the_layers() -> None:
    model = made()
    model.use_adapters()
    requests = PagedRequests(model)
    requests.adapters["a"] = 0
    answers(requests, [{"a": [1]}] * 4)
    assert not recorded(model).num_repeated
    requests.adapters.clear()
    answers(requests, [{"a": [1]}] * 4)
    assert recorded(model).num_repeated == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_with_parts_of_prompts_share_recordings_for_more_rows(dtype: torch.dtype) -> None:
    model, chance = made(dtype, query_key_norm="head"), random.Random(1)
    sizes = (EXACT_ROWS + 1, EXACT_ROWS + STEP, EXACT_ROWS + 5, MOST_RECORDED_ROWS, EXACT_ROWS + 2, EXACT_ROWS + 3)
    passes = [
        {"a": [1], f"b{number}": [chance.randrange(256) for _ in range(rows - 1)]} for number, rows in enumerate(sizes)
    ]
    expected = without_recordings(model, passes)
    for one, other in zip(answers(PagedRequests(model), passes), expected, strict=True):
        assert torch.equal(one, other)
    assert recorded(model).num_repeated == (3 if model.is_packed else 0)


def test_large_passes_call_the_layers() -> None:
    model = made()
    requests = PagedRequests(model)
    answers(requests, [{"a": [1] * (MOST_RECORDED_ROWS + 1)}] * 3)
    assert not recorded(model).num_repeated
    answers(requests, [{"a": [1] * MOST_RECORDED_ROWS}] * 3)
    assert recorded(model).num_repeated == 1


def test_memory_is_that_of_two_layers_for_all_numbers_of_rows() -> None:
    model = made(num_layers=6)
    layers, requests = recorded(model), PagedRequests(model)
    row_bytes = 0
    for rows in range(1, 17):
        answers(requests, [{"a": [1] * rows}] * 2)
        row_bytes = row_bytes or layers.num_bytes
    assert 0 < row_bytes < 2 * 4 * (8 * 64 + 4 * 96 + 256)
    assert layers.num_bytes <= 31 * row_bytes


def test_the_oldest_recordings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_layers, "MOST_KINDS", 4)
    model, passes = made(), mixed_passes()
    expected = without_recordings(model, passes)
    for one, other in zip(answers(PagedRequests(model), passes), expected, strict=True):
        assert torch.equal(one, other)
    assert len(recorded(model)._recorded) <= 4


def test_a_profile_has_the_operators_of_every_pass() -> None:
    requests = PagedRequests(made())
    answers(requests, [{"a": [1]}] * 3)
    with torch.profiler.profile() as profile:
        answers(requests, [{"a": [1]}])
    names = {each.key for each in profile.key_averages()}
    assert {"linear", "mkldnn::_linear_pointwise"} & names
