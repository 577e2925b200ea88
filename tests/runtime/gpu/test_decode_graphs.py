"""Passes without prompts as CUDA graphs on a pretended GPU: the tokens of eager passes, and few launches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_support.pretended import PretendedDevice, PretendedTensor, Work
from gpu_support.small_engine import (
    LATENTS,
    LOWER_CASE,
    generate,
    on_gpu,
    one_layer,
    random_decoder,
    small_engine,
    suspend_and_resume,
)

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.sampling_params import SamplingParams

LENGTHS = (5, 3, 6)
"""Of the answers: passes of 3, 2 and 1 requests."""
LAUNCHES_PER_LAYER = 11
LAUNCHES_AROUND_LAYERS = 20
"""The budgets of a decode pass with its sampling."""

pytestmark = pytest.mark.usefixtures("device_guard", "short_splits")


def captured_engine(model: Decoder, **config: Any) -> DynamicInferenceEngine:
    """With graphs for 1 and 3 requests."""
    return small_engine(on_gpu(model), **({"num_cuda_graphs": -1, "max_requests": 3} | config))


LOG_PROBS = {"temperature": 0.7, "repetition_penalty": 1.3, "return_log_probs": True, "top_n_logprobs": 3}
EDITS = {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 9}
CASES: dict[str, dict[str, Any]] = {
    "samplers": {"params": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "top_n_sigma": 3.0}},
    "edits, log probs, windows": {"params": LOG_PROBS, "model": {"num_layers": 2, "layer_windows": (8, None)}},
    "latents": {"params": {"temperature": 0.8, "top_k": 40}, "model": LATENTS | {"num_layers": 2}},
    "grammar": {"params": {"temperature": 1.0, "grammar": LOWER_CASE, "ignore_eos": False}},
    "chunks and prefixes": {"config": {"max_tokens": 16, "enable_prefix_caching": True}},
    "evictions": {"config": {"kv_cache_memory_bytes": 16 << 10}},
    "offload": {
        "config": {"kv_cache_management_mode": "offload", "offload_weights": True},
        "between": suspend_and_resume,
    },
    "recompute": {"config": {"kv_cache_management_mode": "recompute"}, "between": suspend_and_resume},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_graphs_give_the_tokens_of_the_cpu(case: dict[str, Any], device: PretendedDevice) -> None:
    given = {"params": {}, "between": None, "config": {}, "model": {}} | case
    model = one_layer(**given["model"])
    expected = generate(small_engine(model, **given["config"]), given["params"], given["between"], LENGTHS)
    engine = captured_engine(model, **given["config"])
    device.work = Work()
    assert generate(engine, given["params"], given["between"], LENGTHS) == expected
    assert device.work.replays >= 2 * (max(LENGTHS) - 2)
    assert given["config"].get("offload_weights") or +device.work.copies == {}
    engine.check_integrity()


def test_log_probs_are_those_of_eager_passes(device: PretendedDevice) -> None:
    model = one_layer()
    found = []
    for engine in (small_engine(on_gpu(model)), captured_engine(model)):
        future = engine.add_request(0, [65] * 5, SamplingParams(**LOG_PROBS, num_tokens_to_generate=6, seed=1))
        while engine.has_unfinished_requests():
            engine.step_modern()
        found.append(future.result(timeout=0).merge().generated_log_probs)
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert device.work.replays > 0


def begun(engine: DynamicInferenceEngine, count: int, params: dict[str, Any]) -> None:
    """Requests whose prompts are computed."""
    for index in range(count):
        engine.add_request(index, [65 + index] * 5, SamplingParams(num_tokens_to_generate=20, seed=index, **params))
    engine.step_modern()


STEPS: dict[str, tuple[dict[str, Any], int, int]] = {
    "samplers": ({"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05}, 0, 1),
    "edits": (EDITS, 2, 2),
    "penalties": ({"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2}, 1, 2),
    "grammar": ({"temperature": 1.0, "grammar": LOWER_CASE}, 1, 2),
}
"""Parameters of the requests, and the most launches beside the two of graphs, and copies from pinned memory."""


@pytest.mark.parametrize(("params", "launches", "copies"), STEPS.values(), ids=STEPS)
def test_a_step_has_two_launches_one_copy_and_one_wait(
    params: dict[str, Any], launches: int, copies: int, device: PretendedDevice
) -> None:
    model = one_layer()
    for count in (1, 2):
        engine = captured_engine(model)
        begun(engine, count, params)
        engine.step_modern()  # The blocks of the prompts are known now.
        device.work = Work()
        result = engine.step_modern()
        assert result["cuda_graph_request_count"] == {1: 1, 2: 3}[count]
        assert device.work.replays == 2
        assert device.work.launches <= 2 + launches
        assert (device.work.pinned_copies, +device.work.copies) == (copies, {})
        assert sum(device.work.waits.values()) == 1


def test_the_launches_of_a_graph_are_within_the_budget(device: PretendedDevice) -> None:
    counted = []
    for layers in (1, 2):
        device.graphs = []
        captured_engine(random_decoder(num_layers=layers))
        by_size = [len(forward.launches) + len(sampling.launches) for forward, sampling in _pairs(device.graphs)]
        assert len(set(by_size)) == 1
        counted.append(by_size[0])
    per_layer = counted[1] - counted[0]
    assert per_layer <= LAUNCHES_PER_LAYER
    assert counted[0] - per_layer <= LAUNCHES_AROUND_LAYERS


def _pairs(graphs: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(graphs[::2], graphs[1::2], strict=True))


@pytest.mark.usefixtures("device", "one_pass_at_a_time")
def test_padding_neither_writes_to_blocks_nor_changes_tokens() -> None:
    """Two requests on a graph of three, over a cache whose other slots are NaN."""
    model = one_layer()
    engines = [small_engine(on_gpu(model)), captured_engine(model)]
    found = []
    for engine in engines:
        begun(engine, 2, {"temperature": 0.9})
        sequences = [engine._sequence(index) for index in engine.scheduler.running_ids]
        size = engine.context.block_size_tokens
        used = {each.blocks[at // size] * size + at % size for each in sequences for at in range(each.num_computed)}
        new = {each.blocks[-1] * size + each.num_computed % size for each in sequences}
        arrays = list(engine.context.kv_cache.layer(0))
        others = torch.tensor([slot for slot in range(len(arrays[0]) * size) if slot not in used])
        for array in arrays:
            array.content[others // size, :, others % size] = math.nan
        before = [array.content.clone() for array in arrays]
        result = engine.step_modern()
        found.append([each.tokens[-1] for each in sequences])
        for array, old in zip(arrays, before, strict=True):
            changed = {
                block * size + offset
                for block, _, offset, _ in (array.content.nan_to_num(9) != old.nan_to_num(9)).nonzero().tolist()
            }
            assert changed == new
    assert result["cuda_graph_request_count"] == 3
    assert found[0] == found[1]


def test_graphs_are_captured_when_the_engine_is_created(device: PretendedDevice) -> None:
    engine = captured_engine(one_layer())
    assert engine.capture_stats is not None
    assert engine.capture_stats.keys() == {"time", "allocated_bytes", "reserved_bytes"}
    compiled, captured = device.work.variants.copy(), len(device.graphs)
    assert captured == 2 * len((1, 3))
    begun(engine, 3, {"temperature": 0.9, "top_k": 5})
    seen = [engine.step_modern()["cuda_graph_request_count"] for _ in range(3)]
    assert seen == [3, 3, 3]
    engine.abort_request(0)
    engine.abort_request(1)
    assert engine.step_modern()["cuda_graph_request_count"] == 1
    assert len(device.graphs) == captured
    names = {variant[0] for variant in device.work.variants - compiled}
    assert names <= {"attend_tiles", "attend_splits", "merge_splits"}, "the prompts alone have other kernels"


@pytest.mark.usefixtures("one_pass_at_a_time")
def test_a_pass_beyond_the_graphs_or_with_a_prompt_runs_eagerly(device: PretendedDevice) -> None:
    model = one_layer()
    engine = captured_engine(model, cuda_graph_max_tokens=2)
    for index, length in enumerate((3, 6, 6)):
        engine.add_request(index, [65] * 5, SamplingParams(num_tokens_to_generate=length, temperature=0.0))
    seen = [engine.step_modern()["cuda_graph_request_count"] for _ in range(4)]
    assert seen == [None, None, None, 2]
    engine.add_request(3, [65] * 5, SamplingParams(num_tokens_to_generate=2, temperature=0.0))
    assert engine.step_modern()["cuda_graph_request_count"] is None
    assert device.work.replays == 2


@pytest.mark.usefixtures("one_pass_at_a_time")
def test_a_pass_with_an_adapter_runs_eagerly(device: PretendedDevice) -> None:
    engine = captured_engine(one_layer())
    for index in range(2):
        engine.add_request(index, [65] * 5, SamplingParams(num_tokens_to_generate=6, temperature=0.0))
    engine.step_modern()
    assert engine.step_modern()["cuda_graph_request_count"] is not None
    sequence = engine._requests[1].sequence
    assert sequence is not None
    sequence.adapter = 0
    assert engine.step_modern()["cuda_graph_request_count"] is None
    assert device.work.replays == 2


def test_the_drafts_of_all_requests_are_rows_of_a_graph(device: PretendedDevice) -> None:
    """A pass of three requests with two drafts each has nine rows, and no pass without prompts runs eagerly."""
    model = one_layer()
    params = SamplingParams(num_tokens_to_generate=24, temperature=0.0, logit_bias={70: 50.0})
    prompts = [[65 + index] * 5 for index in range(3)]
    expected = [record.merge().generated_tokens for record in small_engine(model).generate(prompts, params)]
    engine = captured_engine(model, num_speculative_tokens=2)
    engine.context.clock = lambda: 0.0  # Drafts are permitted whatever they cost here.
    device.work = Work()
    futures = [engine.add_request(index, prompt, params) for index, prompt in enumerate(prompts)]
    sizes = []
    while engine.has_unfinished_requests():
        sizes.append(engine.step_modern()["cuda_graph_request_count"])
    assert [future.result(timeout=0).merge().generated_tokens for future in futures] == expected
    assert sizes[0] is None, "the pass of the prompts"
    assert None not in sizes[1:]
    assert sizes.count(9) >= 3
    assert len(sizes) < 16


@pytest.mark.usefixtures("one_pass_at_a_time")
def test_more_new_blocks_than_a_graph_has_room_for_come_by_one_more_copy(device: PretendedDevice) -> None:
    model = one_layer()
    params = SamplingParams(num_tokens_to_generate=5, temperature=0.0)
    found = []
    for engine in (small_engine(model), captured_engine(model)):
        future = engine.add_request(0, [65 + at % 50 for at in range(70)], params)
        engine.step_modern()
        device.work = Work()
        engine.step_modern()
        pinned = device.work.pinned_copies
        while engine.has_unfinished_requests():
            engine.step_modern()
        found.append(future.result(timeout=0).merge().generated_tokens)
    assert pinned == 2
    assert found[0] == found[1]


def test_graphs_of_weights_that_stay_are_kept_and_those_of_a_live_model_captured_again(device: PretendedDevice) -> None:
    engine = captured_engine(one_layer())
    captured = len(device.graphs)
    suspend_and_resume(engine)
    assert len(device.graphs) == captured
    engine.controller.model.is_shared = True
    suspend_and_resume(engine)
    assert len(device.graphs) == 2 * captured


def test_new_tensors_of_weights_are_captured_again(device: PretendedDevice) -> None:
    """A checkpoint's weights are copied over the old ones; those of a live model are other tensors."""
    model, engine = one_layer(), captured_engine(one_layer())
    captured = len(device.graphs)
    weights = {name: place.clone() * 0.9 for name, place in model.destinations().items()}
    engine.update_weights(weights)
    assert len(device.graphs) == captured
    reference = small_engine(model)
    reference.update_weights(weights)
    assert generate(engine, {}) == generate(reference, {})
    engine.controller.model.is_shared = True
    engine._memory.update_weights(weights)
    assert len(device.graphs) == 2 * captured


EXPERTS = ExpertsConfig(count=8, per_token=2, intermediate_size=64)


def test_a_number_of_graphs_that_is_not_possible_is_refused(device: PretendedDevice) -> None:
    experts = one_layer(architecture="mixtral", experts=EXPERTS)
    scattered = on_gpu(experts)
    matrix = scattered.layers[0].feed_forward.networks[3].down.weight
    matrix.data = matrix.data.t().contiguous().t()
    refused = {"the host has to know .* not contiguous": scattered, "the device cpu": one_layer()}
    for reason, model in refused.items():
        with pytest.raises(ConfigurationError, match=f"^num_cuda_graphs=2: .*{reason}.*; leave it out, or") as refusal:
            small_engine(model, num_cuda_graphs=2)
        assert refusal.value.field == "num_cuda_graphs"
        assert small_engine(model, num_cuda_graphs=-1).capture_stats is None
    assert device.graphs == []


@pytest.mark.usefixtures("device")
def test_a_lack_of_memory_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("megatron_runtime.gpu.graphs.GraphRecorder.record", fail)
    expected = "^--device cuda: cuda:0 ran out of memory while it captured CUDA graphs .*; use --num-cuda-graphs 0, or"
    with pytest.raises(ConfigurationError, match=expected):
        captured_engine(one_layer())


def test_the_pretended_device_computes_nothing_in_a_capture_and_refuses_waits(device: PretendedDevice) -> None:
    """And a replay overwrites what other graphs of its pool have computed."""
    one, total = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    assert isinstance(total, PretendedTensor)
    graphs, pool, made = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], torch.cuda.graph_pool_handle(), []
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            made.append(one + 1)
            total.add_(made[-1])
    assert total.content.tolist() == [0, 0, 0]
    one.fill_(4)
    for graph in graphs:
        graph.replay()
    assert total.content.tolist() == [10, 10, 10]
    assert made[0].content.isnan().all()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="tolist is not permitted during a capture"),
        torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()),  # type: ignore[no-untyped-call]
    ):
        one.tolist()
    assert device.capture is None
