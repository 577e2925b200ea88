"""Passes with prompts as CUDA graphs on a pretended GPU: the tokens of the CPU, and few launches of the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support.pretended import PretendedDevice, Work, pretended_device
from gpu_support.small_engine import (
    LATENTS,
    LOWER_CASE,
    on_gpu,
    one_layer,
    random_decoder,
    small_engine,
    suspend_and_resume,
)

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.graph_sizes import GraphSize
from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.sampling_params import SamplingParams

LENGTHS = {0: (3, 9), 2: (12, 4), 3: (7, 3), 5: (24, 3)}
"""By the step before which a request arrives: the tokens of its prompt, and of its answer."""

EXPERTS = ExpertsConfig(count=8, per_token=2, intermediate_size=64)

pytestmark = pytest.mark.usefixtures("device_guard", "short_splits")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs for 16 and 32 tokens."""
    monkeypatch.setattr("megatron_runtime.engine.graph_sizes._TOKEN_STEP", 16)


def captured_engine(model: Decoder, **config: Any) -> DynamicInferenceEngine:
    """With graphs of up to 32 tokens, for 1 and 3 requests."""
    settings: dict[str, Any] = {"num_cuda_graphs": -1, "max_requests": 3, "cuda_graph_max_tokens": 32}
    settings["use_cuda_graphs_for_non_decode_steps"] = True
    return small_engine(on_gpu(model), **(settings | config))


def prompt(length: int, first: int = 0) -> list[int]:
    """Tokens that differ."""
    return [65 + (first * 3 + at * at) % 60 for at in range(length)]


def add(engine: DynamicInferenceEngine, number: int, tokens: list[int], length: int, **params: Any) -> Any:
    given = {"temperature": 0.0, "seed": 7 + number, "num_tokens_to_generate": length, "ignore_eos": True} | params
    return engine.add_request(number, tokens, SamplingParams(**given))


def serve(
    engine: DynamicInferenceEngine,
    params: dict[str, Any],
    between: Callable[[DynamicInferenceEngine], None] | None = None,
) -> tuple[list[Any], list[int | None]]:
    """Tokens and log probabilities of requests that arrive one after the other, and the requests of each graph."""
    futures, sizes = [], []
    for step in range(100):
        if step in LENGTHS:
            tokens, length = LENGTHS[step]
            futures.append(add(engine, step, prompt(tokens, step % 3), length, **params))
        if step > max(LENGTHS) and not engine.has_unfinished_requests():
            break
        sizes.append(engine.step_modern()["cuda_graph_request_count"])
        if between is not None and step == 2:
            between(engine)
    found = [future.result(timeout=0).merge() for future in futures]
    return [(each.generated_tokens, each.generated_log_probs) for each in found], sizes


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samplers": {"params": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "top_n_sigma": 3.0}},
    "edits, windows": {
        "params": {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 2},
        "model": {"num_layers": 2, "layer_windows": (8, None)},
    },
    "latents": {"model": LATENTS, "config": {"max_tokens": 10, "enable_prefix_caching": True}},
    "latents and experts": {"model": LATENTS | {"architecture": "mixtral", "experts": EXPERTS}},
    "experts": {"model": {"architecture": "mixtral", "experts": EXPERTS}},
    "grammar": {"params": {"temperature": 1.0, "grammar": LOWER_CASE, "ignore_eos": False}},
    "chunks and prefixes": {"config": {"max_tokens": 10, "enable_prefix_caching": True}},
    "drafts": {"params": {"logit_bias": {70: 50.0}}, "config": {"num_speculative_tokens": 1}},
    "offload": {
        "config": {"kv_cache_management_mode": "offload", "offload_weights": True},
        "between": suspend_and_resume,
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_pass_is_a_graph_and_gives_the_tokens_of_the_cpu(case: dict[str, Any], device: PretendedDevice) -> None:
    given = {"params": {}, "between": None, "config": {}, "model": {}} | case
    model = one_layer(**given["model"])
    config = {"max_requests": 3} | given["config"]
    expected, _ = serve(small_engine(model, **config), given["params"], given["between"])
    engine = captured_engine(model, **given["config"])
    device.work = Work()
    found, sizes = serve(engine, given["params"], given["between"])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert None not in sizes
    assert given["config"].get("offload_weights") or +device.work.copies == {}
    engine.check_integrity()


def test_log_probs_of_answers_are_those_of_the_cpu() -> None:
    params = {"temperature": 0.7, "repetition_penalty": 1.3, "return_log_probs": True, "skip_prompt_log_probs": True}
    model = one_layer()
    expected, _ = serve(small_engine(model, max_requests=3), params)
    with pretended_device():
        found, sizes = serve(captured_engine(model), params)
    assert None not in sizes
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


STEPS: dict[str, tuple[dict[str, Any], int, int]] = {
    "samplers": ({"temperature": 0.8, "top_k": 40}, 0, 1),
    "edits": ({"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 2}, 3, 2),
}
"""Parameters of the requests, and the most launches beside the two of graphs, and copies from pinned memory."""


@pytest.mark.usefixtures("one_pass_at_a_time")
@pytest.mark.parametrize(("params", "launches", "copies"), STEPS.values(), ids=STEPS)
def test_a_step_with_prompts_has_two_launches_one_copy_and_one_wait(
    params: dict[str, Any], launches: int, copies: int, device: PretendedDevice
) -> None:
    engine = captured_engine(one_layer())
    for others in range(2):
        if others:
            add(engine, 0, prompt(3), 9, **params)
            engine.step_modern()
        add(engine, 1 + others, prompt(20), 2, **params)
        device.work = Work()
        result = engine.step_modern()
        assert result["cuda_graph_request_count"] == (1, 3)[others]
        assert device.work.replays == 2
        assert device.work.launches <= 2 + launches
        assert device.work.pinned_copies <= copies
        assert +device.work.copies == {}
        assert sum(device.work.waits.values()) == 1
        engine.step_modern()


def test_a_part_of_a_prompt_alone_is_one_launch(device: PretendedDevice) -> None:
    """Nothing is sampled, and there is nothing to wait for but the list of no tokens."""
    engine = captured_engine(one_layer(), max_tokens=16)
    add(engine, 0, prompt(24), 2)
    device.work = Work()
    assert engine.step_modern()["cuda_graph_request_count"] == 1
    assert (device.work.launches, device.work.replays, device.work.pinned_copies) == (1, 1, 1)


def test_the_launches_of_a_graph_with_prompts_are_within_the_budget(device: PretendedDevice) -> None:
    counted = []
    for layers in (1, 2):
        device.graphs = []
        captured_engine(random_decoder(num_layers=layers), cuda_graph_max_tokens=16)
        counted.append(len(device.graphs[0].launches))
    assert counted[1] - counted[0] <= 11
    assert 2 * counted[0] - counted[1] <= 12


@pytest.mark.usefixtures("one_pass_at_a_time")
def test_the_smallest_graph_that_fits_is_used(device: PretendedDevice) -> None:
    engine = captured_engine(one_layer())
    graphs = engine._memory.graphs
    assert graphs is not None
    prompts = [size for size in graphs.sizes if size.has_prompts]
    assert prompts == [(16, 1), (16, 3), (32, 1), (32, 3)]
    assert len(device.graphs) == len(prompts) + 2 * len((1, 3))
    seen: list[GraphSize | None] = []
    size_for = graphs.size_for

    def noted(slices: Any) -> GraphSize | None:
        seen.append(size_for(slices))
        return seen[-1]

    graphs.size_for = noted  # type: ignore[method-assign]
    add(engine, 0, prompt(16), 9)
    engine.step_modern()
    add(engine, 1, prompt(16), 9)
    engine.step_modern()
    add(engine, 2, prompt(14), 9)
    engine.step_modern()
    engine.step_modern()
    assert seen == [(16, 1), (32, 3), (16, 3), (3, 3)]


@pytest.mark.usefixtures("device", "one_pass_at_a_time")
def test_what_a_graph_has_no_results_for_runs_eagerly() -> None:
    engine = captured_engine(one_layer())
    add(engine, 0, prompt(3), 20)
    engine.step_modern()
    add(engine, 1, prompt(33), 1)
    assert engine.step_modern()["cuda_graph_request_count"] is None, "it has more tokens than all graphs"
    future = add(engine, 2, prompt(5), 1, return_log_probs=True, skip_prompt_log_probs=False)
    assert engine.step_modern()["cuda_graph_request_count"] is None, "log probabilities of a prompt"
    assert len(future.result(timeout=0).merge().prompt_log_probs) == 4
    add(engine, 3, prompt(5), 3)
    engine._requests[3].sequence.adapter = 0  # type: ignore[union-attr]
    assert engine.step_modern()["cuda_graph_request_count"] is None, "an adapter"
    engine.abort_request(3)
    add(engine, 4, prompt(5), 1)
    assert engine.step_modern()["cuda_graph_request_count"] == 3


@pytest.mark.parametrize("setting", [{"use_cuda_graphs_for_non_decode_steps": False}, {"cuda_graph_max_tokens": 1}])
def test_prompts_run_eagerly_without_graphs_for_them(setting: dict[str, Any], device: PretendedDevice) -> None:
    engine = captured_engine(one_layer(), **setting)
    add(engine, 0, prompt(5), 3)
    assert [engine.step_modern()["cuda_graph_request_count"] for _ in range(2)] == [None, 1]
    assert all("attend_tiles" not in graph.kernels for graph in device.graphs)


@pytest.mark.usefixtures("one_pass_at_a_time")
def test_padding_neither_writes_to_blocks_nor_changes_tokens(device: PretendedDevice) -> None:
    """A request of one token, and a prompt of 5, on a graph of 16 tokens and 3 requests, over a cache whose other slots
    are NaN."""
    model = one_layer()
    found = []
    for engine in (small_engine(on_gpu(model)), captured_engine(model)):
        add(engine, 0, prompt(6), 9, temperature=0.9)
        engine.step_modern()
        sequence, size = engine._sequence(0), engine.context.block_size_tokens
        arrays = list(engine.context.kv_cache.layer(0))
        used = {sequence.blocks[at // size] * size + at % size for at in range(6)}
        others = torch.tensor([slot for slot in range(len(arrays[0]) * size) if slot not in used])
        for array in arrays:
            array.content[others // size, :, others % size] = math.nan
        before = [array.content.clone() for array in arrays]
        add(engine, 1, prompt(5), 9, temperature=0.9)
        result = engine.step_modern()
        other = engine._sequence(1)
        new = {sequence.blocks[0] * size + 6, *(other.blocks[0] * size + at for at in range(5))}
        for array, old in zip(arrays, before, strict=True):
            is_changed = array.content.nan_to_num(9) != old.nan_to_num(9)
            assert {block * size + at for block, _, at, _ in is_changed.nonzero().tolist()} == new
        found.append([sequence.tokens[-2:], other.tokens[-1:]])
    assert result["cuda_graph_request_count"] == 3
    assert found[0] == found[1]
    assert device.work.replays == 4


@pytest.mark.usefixtures("one_pass_at_a_time")
def test_a_long_cached_prefix_needs_one_more_copy_for_its_blocks(device: PretendedDevice) -> None:
    engine = captured_engine(one_layer(), enable_prefix_caching=True)
    tokens = prompt(130)
    found = []
    for number in range(2):
        future = add(engine, number, tokens, 2)
        device.work = Work()
        size = engine.step_modern()["cuda_graph_request_count"]
        copies = device.work.pinned_copies
        engine.step_modern()
        found.append(future.result(timeout=0).merge().generated_tokens)
    assert size == 1
    assert copies == 2
    assert found[0] == found[1]


@pytest.mark.usefixtures("without_cuda_bindings")
def test_graphs_with_prompts_are_captured_again_after_a_suspension_that_moves_memory(device: PretendedDevice) -> None:
    engine = captured_engine(one_layer(), kv_cache_management_mode="recompute")
    graphs = engine._memory.graphs
    assert graphs is not None
    captured, sizes = len(device.graphs), graphs.sizes
    suspend_and_resume(engine)
    assert len(device.graphs) == 2 * captured
    assert graphs.sizes == sizes
