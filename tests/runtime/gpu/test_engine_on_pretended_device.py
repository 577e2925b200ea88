"""The engine on a pretended GPU gives the tokens of the CPU, and what it asks of the device is counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support.engine_cases import CASES, RECURRENT, write_adapters
from gpu_support.pretended import PretendedTensor, Work, pretended_device
from gpu_support.small_engine import (
    LATENTS,
    LAYERS,
    LOWER_CASE,
    generate,
    on_gpu,
    random_decoder,
    small_engine,
)
from runtime_support.byte_backend import END

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.sampling_params import SamplingParams

LAUNCHES_PER_ADAPTER = 3 * 2 + 4 * 3
"""In a layer: 3 for each matrix, of which q and v are parts of one, and 4 for each module."""
LAUNCHES_AROUND_LAYERS = 6
"""Embedding, rotation, and from the last layer to logits."""
LAUNCHES_PER_LAYER = 10
"""9 for contexts of one split."""
LAUNCHES_PER_LAYER_OF_LATENTS = 12
LAUNCHES_OF_LOG_PROBS = 20


SPLIT = 32
"""A multiple of the keys that a kernel sees at once."""

pytestmark = pytest.mark.usefixtures("device_guard")


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short contexts have several."""
    monkeypatch.setattr("megatron_runtime.gpu.attention.SPLIT", SPLIT)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_engine_gives_the_tokens_of_the_cpu(case: dict[str, Any]) -> None:
    given = {"params": {}, "between": None, "config": {}, "model": {}} | case
    model = random_decoder(**given["model"])
    expected = generate(small_engine(model, **given["config"]), given["params"], given["between"])
    with pretended_device() as device:
        other = on_gpu(model)
        assert isinstance(next(other.parameters()), PretendedTensor)
        other.prepare_kernels(InferenceConfig().block_size_tokens)
        compiled = device.work.variants
        device.work = Work()
        engine = small_engine(other, **given["config"])
        assert generate(engine, given["params"], given["between"]) == expected
    assert device.work.variants <= compiled, "a request would wait for the compiler"
    assert not any("context.py" in line or "packed_arrays.py" in line for line in +device.work.copies)
    assert device.work.pinned_copies > 0
    splits, storing = ("attend_splits", "rotate_and_store")
    if "latent_attention" in given["model"]:
        splits, storing = ("attend_latent_splits", "absorb_and_store")
    assert device.work.kernels[splits] >= LAYERS
    assert device.work.kernels[storing] >= LAYERS
    assert ("race_tokens" in device.work.kernels) == ("temperature" in given["params"])


@pytest.mark.parametrize("case", RECURRENT.values(), ids=RECURRENT)
def test_recurrent_layers_give_the_tokens_of_the_cpu(case: dict[str, Any]) -> None:
    """PyTorch's operators compute the recurrence, one token after the other."""
    model = random_decoder(**case["model"])
    expected = generate(small_engine(model), {})
    with pretended_device():
        assert generate(small_engine(on_gpu(model)), {}) == expected


def test_requests_with_adapters_have_the_tokens_of_the_cpu_without_a_wait_or_an_unpinned_copy(tmp_path: Path) -> None:
    """In passes that other requests share; the rows of each adapter come with the other tables. The launches depend on
    the number of adapters alone."""
    folders = write_adapters(tmp_path)
    model = random_decoder(num_layers=1)

    def answers(engine: DynamicInferenceEngine, names: Sequence[str | None]) -> list[list[int]]:
        for folder in folders:
            engine.adapters.load(folder.name, folder)
        for number, name in enumerate(names):
            params = SamplingParams(temperature=0.0, ignore_eos=True, adapter=name)
            engine.add_request(number, [65 + number] * 5, params)
        device.work = Work()
        for _ in range(6):
            engine.step_modern()
        return [engine.get_request(number).generated_tokens for number in range(len(names))]

    launches, mixed = [], ("one", None, "three")
    with pretended_device() as device:
        for names in ((None, None, None), ("one", None, None), ("one", "one", None), mixed):
            found = answers(small_engine(on_gpu(model)), names)
            assert sum(device.work.waits.values()) == 6, device.work.waits
            assert +device.work.copies == {}
            launches.append(device.work.launches)
    assert found == answers(small_engine(random_decoder(num_layers=1)), mixed)
    assert len({tuple(tokens) for tokens in found}) == 3
    without, *others = launches
    for count, used in zip(others, (1, 1, 2), strict=True):
        assert count - without <= 6 * used * LAUNCHES_PER_ADAPTER


@pytest.mark.parametrize(
    ("changes", "budget"),
    [({}, LAUNCHES_PER_LAYER), (LATENTS, LAUNCHES_PER_LAYER_OF_LATENTS)],
    ids=["heads", "latents"],
)
@pytest.mark.parametrize("length", [9, 2 * SPLIT + 5], ids=["one split", "several splits"])
def test_a_decode_pass_has_few_launches_no_wait_and_no_copy(length: int, changes: dict[str, Any], budget: int) -> None:
    """What a CUDA graph asks of the code that it captures."""
    requests, page = 2, 32
    blocks = -(-length // page)
    counted = []
    for layers in (1, 2):
        model = random_decoder(num_layers=layers, max_position_embeddings=1024, **changes)
        with pretended_device() as device, torch.inference_mode():
            other = on_gpu(model)
            cache = KVCache(model.config, blocks * requests, page, model.dtype, "cuda")
            tables = torch.arange(blocks * requests, dtype=torch.int32).view(requests, blocks)
            last = torch.full((requests,), length - 1)
            batch = {
                "tokens": torch.full((requests,), 65),
                "positions": last,
                "slots": tables[:, -1].long() * page + last % page,
                "query_starts": torch.arange(requests + 1, dtype=torch.int32),
                "context_lengths": (last + 1).int(),
                "block_tables": tables,
                "logit_rows": torch.arange(requests),
            }
            there = ForwardBatch(**{name: value.to("cuda") for name, value in batch.items()})
            device.work = Work()
            logits = other(there, cache)
            assert logits is not None
            assert logits.shape == (requests, END + 1)
            assert (+device.work.waits, +device.work.copies) == ({}, {})
            counted.append(device.work.launches)
    per_layer = counted[1] - counted[0]
    assert per_layer <= budget
    assert counted[0] - per_layer <= LAUNCHES_AROUND_LAYERS


EVERYTHING = {
    **{"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "top_n_sigma": 3.0},
    **{"logit_bias": {70: 2.0}, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 4},
    **{"bad_words": ["AB"], "allowed_token_ids": [*range(60, 120)]},
}
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "greedy": ({"temperature": 0.0}, {}, 2, 1),
    "grammar": ({"temperature": 1.0, "grammar": LOWER_CASE}, {}, 5, 2),
    "everything": (EVERYTHING, {}, 12, 2),
    "log probs": (EVERYTHING | {"return_log_probs": True, "top_n_logprobs": 3}, {}, 12 + LAUNCHES_OF_LOG_PROBS, 3),
    "log probs of what is sampled": (
        EVERYTHING | {"return_log_probs": True, "top_n_logprobs": 3},
        {"logprobs_mode": "processed_logprobs"},
        12 + 2 * LAUNCHES_OF_LOG_PROBS,
        4,
    ),
}
"""Parameters of the requests, settings, and the most launches and copies to the device of the sampler and the batch."""


@pytest.mark.parametrize(("params", "config", "launches", "copies"), STEPS.values(), ids=STEPS)
def test_a_step_waits_once_for_one_copy_of_its_results(
    params: dict[str, Any], config: dict[str, Any], launches: int, copies: int
) -> None:
    """And copies its tables from pinned memory; the number of launches does not depend on the number of requests."""
    model = random_decoder()
    counted = []
    for count in (1, 3):
        with pretended_device() as device:
            engine = small_engine(on_gpu(model), **config)
            for index in range(count):
                given = {"num_tokens_to_generate": 8, "skip_prompt_log_probs": True} | params
                engine.add_request(index, [65] * 5, SamplingParams(**given))
            engine.step_modern()
            device.work = Work()
            engine.step_modern()
            assert +device.work.copies == {}
            assert device.work.pinned_copies <= copies
            assert sum(device.work.waits.values()) == 1
            counted.append(device.work.launches)
    around = LAYERS * LAUNCHES_PER_LAYER + LAUNCHES_AROUND_LAYERS
    assert counted[0] <= around + launches
    assert counted[1] == counted[0]


def test_a_default_device_is_still_that_of_tensors_after_a_pretended_one() -> None:
    torch.utils._device._device_constructors.cache_clear()
    with pretended_device(), torch.device("cpu"):
        torch.zeros(1)
    with torch.device("meta"):
        assert torch.tensor([1]).is_meta
