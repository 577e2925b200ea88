"""The engine with experts on a pretended GPU: the tokens of the CPU, CUDA graphs, and no wait for the choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support.pretended import PretendedDevice, PretendedTensor, Work
from gpu_support.small_engine import generate, on_gpu, random_decoder, small_engine, suspend_and_resume

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.config import ClampedGate, ExpertsConfig, RoutingConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.experts import Experts
from megatron_runtime.sampling_params import SamplingParams

LAUNCHES_PER_LAYER = 13
"""Of a decode pass, with norms of queries and keys; a dense layer without them has 10."""
LENGTHS = (5, 3, 4)
EXPERTS = ExpertsConfig(count=8, per_token=2, intermediate_size=64)
SIGMOIDS = RoutingConfig("sigmoid", normalize_weights=True, has_selection_bias=True)
INPUTS = RoutingConfig("sigmoid", weights_inputs=True)

pytestmark = pytest.mark.usefixtures("device_guard")


def one_layer(experts: ExpertsConfig = EXPERTS, architecture: str = "mixtral", **changes: Any) -> Decoder:
    return random_decoder(**({"num_layers": 1, "architecture": architecture, "experts": experts} | changes))


MODELS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoids, a shared expert, a dense layer": {
        **{"experts": ExpertsConfig(8, 2, 64, SIGMOIDS, frozenset({0}), 32), "architecture": "glm4_moe"},
        "num_layers": 2,
    },
    "a shared expert of the size of the others": {
        "experts": ExpertsConfig(8, 2, 64, SIGMOIDS, shared_intermediate_size=64),
        "architecture": "glm4_moe",
    },
    "a shared expert with a gate": {
        "experts": ExpertsConfig(8, 2, 64, shared_intermediate_size=32, has_shared_expert_gate=True)
    },
    "biases and clamped gates": {"mlp_bias": True, "clamped_gate": ClampedGate(1.7, 0.5), "architecture": "gpt_oss"},
    "groups": {"experts": ExpertsConfig(8, 2, 64, RoutingConfig("sigmoid", groups=4, groups_per_token=2))},
    "weights of the inputs, a shared expert": {
        "experts": ExpertsConfig(8, 1, 64, INPUTS, shared_intermediate_size=64),
        "architecture": "llama4_text",
    },
    "weights of the inputs": {"experts": ExpertsConfig(8, 1, 64, INPUTS), "architecture": "llama4_text"},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_graphs_and_prompts_give_the_tokens_of_the_cpu(changes: dict[str, Any], device: PretendedDevice) -> None:
    """Without a wait in a layer, and with kernels that were compiled before."""
    model = one_layer(**changes)
    expected = generate(small_engine(model), {}, lengths=LENGTHS)
    there = on_gpu(model)
    there.prepare_kernels(InferenceConfig().block_size_tokens)
    compiled = device.work.variants
    engine = small_engine(there, num_cuda_graphs=-1, max_requests=3)
    device.work = Work()
    assert generate(engine, {}, lengths=LENGTHS) == expected
    assert device.work.replays >= 2 * (max(LENGTHS) - 2)
    assert device.work.kernels["widen_visits"] > device.work.replays / 2, "prompts use the kernels too"
    files = {line.partition(":")[0] for line in +device.work.waits}
    assert {name for name in files if name.startswith(("model/", "gpu/", "parallel/"))} == {"parallel/single_rank.py"}
    assert device.work.variants <= compiled, "a request would wait for the compiler"


def test_the_launches_of_a_layer_are_within_the_budget(device: PretendedDevice) -> None:
    counted = []
    for layers in (1, 2):
        device.graphs = []
        model = one_layer(num_layers=layers, query_key_norm="head", architecture="qwen3_moe")
        small_engine(on_gpu(model), num_cuda_graphs=-1, max_requests=2)
        decodes = [
            each for each in device.graphs if "widen_visits" in each.kernels and "attend_tiles" not in each.kernels
        ]
        of_single = [len(each.launches) for each in decodes if "sort_visits" not in each.kernels]
        counted.append((max(len(each.launches) for each in decodes), max(of_single)))
    assert counted[1][0] - counted[0][0] <= LAUNCHES_PER_LAYER
    assert counted[1][1] - counted[0][1] <= LAUNCHES_PER_LAYER - 1


@pytest.mark.usefixtures("without_cuda_bindings")
def test_moved_weights_are_found_again(device: PretendedDevice) -> None:
    """The addresses of the matrices after a suspension are others."""
    model = one_layer()
    config = {"kv_cache_management_mode": "offload", "offload_weights": True, "max_requests": 3}
    expected = generate(small_engine(model, **config), {}, suspend_and_resume, LENGTHS)
    engine = small_engine(on_gpu(model), num_cuda_graphs=-1, **config)
    assert generate(engine, {}, suspend_and_resume, LENGTHS) == expected
    weights = {name: place.clone() * 0.9 for name, place in model.destinations().items()}
    reference = small_engine(model, **config)
    for each in (engine, reference):
        each.update_weights(weights)
    assert generate(engine, {}, lengths=LENGTHS) == generate(reference, {}, lengths=LENGTHS)
    assert device.work.replays > 0


def moved(engine: DynamicInferenceEngine) -> None:
    """Suspended; the owner of a live model moves the weights meanwhile."""
    engine.suspend()
    for weight in engine.controller.model.parameters():
        assert isinstance(weight, PretendedTensor)
        old, weight.content = weight.content, weight.content.clone()
        old.fill_(float("nan"))
    engine.resume()


def test_weights_that_the_owner_of_a_live_model_moves_are_found_again(device: PretendedDevice) -> None:
    model = one_layer()
    expected = generate(small_engine(model), {}, lengths=LENGTHS)
    engine = small_engine(on_gpu(model), num_cuda_graphs=-1, max_requests=3)
    engine.controller.model.is_shared = True
    captured = len(device.graphs)
    assert generate(engine, {}, moved, LENGTHS) == expected
    assert len(device.graphs) == 2 * captured


def test_weights_of_a_live_model_that_permit_no_graphs_run_eagerly(device: PretendedDevice) -> None:
    model = one_layer()
    expected = generate(small_engine(model), {}, lengths=LENGTHS)
    engine = small_engine(on_gpu(model), num_cuda_graphs=-1, max_requests=3)
    engine.controller.model.is_shared = True
    matrix = engine.controller.model.layers[0].feed_forward.networks[1].down.weight
    matrix.data = matrix.data.t().contiguous().t()
    suspend_and_resume(engine)
    device.work = Work()
    assert generate(engine, {}, lengths=LENGTHS) == expected
    assert device.work.replays == 0


def test_experts_of_a_slice_add_their_part(device: PretendedDevice) -> None:
    """As on the ranks of an expert parallel group."""
    layer = on_gpu(one_layer()).layers[0]
    whole = layer.feed_forward
    assert isinstance(whole, Experts)
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).to("cuda")
    with torch.inference_mode():
        expected, total = whole(hidden), torch.zeros(6, 32)
        networks = list(whole.networks)
        for here in (range(3), range(3, 8)):
            whole.here, whole.networks = here, torch.nn.ModuleList(networks[here.start : here.stop])
            whole._grouped = None
            total += whole(hidden).content
    assert torch.allclose(total, expected.content, atol=1e-5)
    assert device.work.kernels["narrow_visits"] == 3


def test_with_fixed_rows_all_numbers_of_tokens_have_the_same_tiles(
    device: PretendedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_runtime.engine.graph_sizes.FIXED_ROWS", 4)
    engine = small_engine(on_gpu(one_layer()), batch_invariant=True, num_cuda_graphs=-1, max_requests=3)
    device.work = Work()
    generate(engine, {}, lengths=LENGTHS)
    assert device.work.replays > 0
    tiles = {value for name, *rest in device.work.variants if name == "widen_visits" for key, value in _pairs(rest)}
    assert len(tiles) == 1


def _pairs(variant: list[Any]) -> list[tuple[str, int]]:
    return [(each[0], each[1]) for each in variant if each[0] == "BLOCK_M"]


def test_recorded_choices_are_those_of_the_cpu_and_exclude_graphs(device: PretendedDevice) -> None:
    model, params = one_layer(), SamplingParams(num_tokens_to_generate=4, temperature=0.0)
    recorded = []
    for there in (model, on_gpu(model)):
        engine = small_engine(there, moe_enable_routing_replay=True)
        merged = engine.generate([[65] * 5], params)[0].merge()
        assert merged.routing_indices is not None
        recorded.append((merged.generated_tokens, merged.routing_indices.tolist()))
    assert recorded[0] == recorded[1]
    assert device.work.kernels["route_rows"] > 0
    with pytest.raises(ConfigurationError, match=r"^num_cuda_graphs=2: the host records which experts"):
        small_engine(on_gpu(model), num_cuda_graphs=2, moe_enable_routing_replay=True)


@pytest.mark.usefixtures("device")
def test_replayed_choices_run_eagerly() -> None:
    model, sizes = one_layer(), set()
    params = SamplingParams(num_tokens_to_generate=4, temperature=0.0, replayed_routing=[[[7, 6]]] * 8)
    found = []
    for engine in (small_engine(model), small_engine(on_gpu(model), num_cuda_graphs=-1)):
        future = engine.add_request(0, [65] * 5, params)
        while engine.has_unfinished_requests():
            sizes.add(engine.step_modern()["cuda_graph_request_count"])
        found.append(future.result(timeout=0).merge().generated_tokens)
    assert sizes == {None}
    assert found[0] == found[1]
    others = small_engine(model).generate([[65] * 5], SamplingParams(num_tokens_to_generate=4, temperature=0.0))
    assert found[0] != others[0].merge().generated_tokens
