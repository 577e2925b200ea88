"""Suspensions on the pretended device: memory returns to the driver, and CUDA graphs remain valid at its addresses."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support.fake_driver import GRANULARITY
from gpu_support.pretended import PretendedDevice, Work
from gpu_support.small_engine import generate, on_gpu, one_layer, small_engine, suspend_and_resume
from runtime_support.memory_shortages import CUDA

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError, EngineError
from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.experts import Experts

pytestmark = pytest.mark.usefixtures("device_guard", "short_splits")

RELEASED: dict[str, Any] = {"kv_cache_management_mode": "offload", "offload_weights": True}
LENGTHS = (5,)


def captured_engine(model: Decoder, **config: Any) -> DynamicInferenceEngine:
    """With a graph for one request."""
    return small_engine(on_gpu(model), num_cuda_graphs=1, max_requests=1, **config)


def addresses(engine: DynamicInferenceEngine) -> list[int]:
    """Of all that a suspension releases."""
    model = engine.controller.model
    tensors = [*engine.context.kv_cache.layer(0), *model.parameters(), *model.buffers()]
    return [each.data_ptr() for each in tensors]


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_memory_returns_to_the_driver_and_the_same_graphs_run_again(mode: str, device: PretendedDevice) -> None:
    model, config = one_layer(), RELEASED | {"kv_cache_management_mode": mode, "static_kv_memory_pointers": True}
    expected = generate(small_engine(model), {"temperature": 0.8}, lengths=LENGTHS)
    engine = captured_engine(model, **config)
    captured, before, used = len(device.graphs), addresses(engine), device.driver.used
    released = []

    def suspend(engine: DynamicInferenceEngine) -> None:
        engine.suspend()
        released.append(device.driver.used)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            device.graphs[0].replay()
        engine.resume()
        device.work = Work()

    assert captured > 0
    assert used >= engine.context.kv_cache.num_bytes + sum(each.nbytes for each in engine.controller.model.parameters())
    for _ in range(2):
        assert generate(engine, {"temperature": 0.8}, suspend, LENGTHS) == expected
        assert device.work.replays > 0
        assert (len(device.graphs), addresses(engine), device.driver.used) == (captured, before, used)
        engine.reset()
    assert released == [0, 0]


def test_a_lack_of_memory_on_resume_names_the_size_and_the_remedy_and_changes_nothing(device: PretendedDevice) -> None:
    model = one_layer()
    expected = generate(small_engine(model), {}, lengths=LENGTHS)
    engine = captured_engine(model, **RELEASED)
    captured, enough = len(device.graphs), device.driver.used

    def suspend(engine: DynamicInferenceEngine) -> None:
        engine.suspend()
        for memory in (0, enough - 1):  # for nothing, or for all but the last piece
            device.driver.memory = memory
            with pytest.raises(
                EngineError,
                match=r"cuda:0 ran out of memory while the engine resumed \(cuMemCreate of \d+ bytes: CUDA_ERROR_OUT_OF"
                r"_MEMORY \(out of memory\)\); it needs 0\.00\d+ GiB for .* End the programs .* a lower --kv-cache-mem",
            ):
                engine.resume()
            assert engine.is_suspended
            assert device.driver.used == 0
        device.driver.memory = enough
        engine.resume()

    assert generate(engine, {}, suspend, LENGTHS) == expected
    assert len(device.graphs) == captured


@pytest.mark.usefixtures("device", "without_cuda_bindings")
def test_a_lack_of_memory_for_the_graphs_on_resume_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = one_layer()
    expected = generate(small_engine(model), {}, lengths=LENGTHS)
    engine = captured_engine(model, **RELEASED)
    stage = r"ran out of memory while the engine resumed \(.*\); it needs 0\.00\d+ GiB for"

    def suspend(engine: DynamicInferenceEngine) -> None:
        engine.suspend()
        with monkeypatch.context() as without_memory:
            without_memory.setattr("megatron_runtime.gpu.graphs.GraphRecorder.record", CUDA.fail)
            with pytest.raises(EngineError, match=stage):
                engine.resume()
        assert engine.is_suspended
        engine.resume()

    assert generate(engine, {}, suspend, LENGTHS) == expected
    assert engine._memory.graphs is not None
    assert engine._memory.graphs.sizes


def test_weights_that_are_updated_while_suspended_come_to_the_same_addresses(device: PretendedDevice) -> None:
    model = one_layer()
    engine, reference = captured_engine(model, **RELEASED), small_engine(model)
    captured, before = len(device.graphs), addresses(engine)
    weights = {name: place.clone() * 0.9 for name, place in model.destinations().items()}
    engine.suspend()
    engine.update_weights(weights)
    engine.resume()
    reference.update_weights(weights)
    assert generate(engine, {}, lengths=LENGTHS) == generate(reference, {}, lengths=LENGTHS)
    assert (len(device.graphs), addresses(engine)) == (captured, before)


def test_a_live_model_that_takes_the_place_of_the_weights_ends_their_places(
    device: PretendedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = captured_engine(one_layer(), **RELEASED)
    captured, cache = len(device.graphs), engine.context.kv_cache
    device.graphs.clear()  # they refer to their memory, unlike real ones
    engine.suspend()
    other = on_gpu(one_layer())
    other.is_shared = True
    monkeypatch.setattr(
        "megatron_runtime.engine.engine_memory.update_weights", lambda model, _: model.replace_with(other)
    )
    engine.update_weights({})
    engine.resume()
    assert len(device.graphs) == captured
    assert len(device.driver.ranges) == 1, "the addresses of the weights are free again"
    assert device.driver.used - cache.num_bytes < GRANULARITY


@pytest.mark.usefixtures("without_cuda_bindings")
def test_without_cuda_bindings_graphs_are_captured_again(device: PretendedDevice) -> None:
    model = one_layer()
    expected = generate(small_engine(model), {}, lengths=LENGTHS)
    engine = captured_engine(model, **RELEASED)
    captured = len(device.graphs)
    assert generate(engine, {}, suspend_and_resume, LENGTHS) == expected
    assert (len(device.graphs), device.driver.ranges) == (2 * captured, {})
    expected = r"static_kv_memory_pointers=True.*'offload'.*cuda-bindings is missing"
    with pytest.raises(ConfigurationError, match=expected) as refusal:
        captured_engine(model, kv_cache_management_mode="offload", static_kv_memory_pointers=True)
    assert refusal.value.field == "static_kv_memory_pointers"


@pytest.mark.parametrize("config", [RELEASED, {}], ids=["released", "kept"])
def test_the_offsets_of_experts_stay_where_graphs_have_them(config: dict[str, Any], device: PretendedDevice) -> None:
    """They are memory of PyTorch's allocator, which would give them to something else."""
    model = one_layer(architecture="mixtral", experts=ExpertsConfig(count=4, per_token=2, intermediate_size=32))
    engine = captured_engine(model, **config)
    captured = len(device.graphs)
    (experts,) = (each for each in engine.controller.model.modules() if isinstance(each, Experts))
    before = experts.grouped()
    suspend_and_resume(engine)
    assert experts.grouped() is before
    assert len(device.graphs) == captured


def test_what_a_suspension_keeps_has_no_addresses_of_its_own(device: PretendedDevice) -> None:
    small_engine(on_gpu(one_layer()))
    assert device.driver.calls == []


def test_a_new_cache_has_zeros(device: PretendedDevice) -> None:
    engine = captured_engine(one_layer(), kv_cache_management_mode="recompute")
    for _ in range(2):
        assert device.driver.used > 0
        assert all(not array.cpu().any() for array in engine.context.kv_cache.layer(0))
        suspend_and_resume(engine)
