"""Generation epochs: boundaries in the lists of a request, as Megatron stamps them."""

from __future__ import annotations

from collections.abc import Callable

import msgpack

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import DynamicInferenceRequest, FinishedRequestRecord
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = [5, 6, 7]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, num_tokens_to_generate=count, ignore_eos=True)


def step(engine: DynamicInferenceEngine, times: int) -> None:
    for _ in range(times):
        engine.step_modern()


def run(engine: DynamicInferenceEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step_modern()


def test_an_epoch_begins_at_the_last_token_of_a_running_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    future = engine.add_request(0, PROMPT, greedy(8))
    step(engine, 2)
    assert engine.get_request(0).policy_epoch is None
    engine.set_generation_epoch(4)
    step(engine, 1)
    engine.set_generation_epoch(5)
    engine.set_generation_epoch(5)
    run(engine)
    merged = future.result(timeout=0).merge()
    assert merged.policy_epoch == merged.kv_cache_epoch == [(0, 4), (3 + 3 - 1, 5)]


def test_a_later_request_begins_with_the_current_epoch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.set_generation_epoch(7)
    merged = engine.generate([PROMPT], greedy(2))[0].merge()
    assert merged.policy_epoch == merged.kv_cache_epoch == [(0, 7)]


def test_the_cache_of_an_evicted_request_belongs_to_the_epoch_that_computes_it_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.set_generation_epoch(1)
    future = engine.add_request(0, PROMPT, greedy(8))
    step(engine, 3)
    engine._passes.evict_all()
    assert engine.get_request(0).kv_cache_epoch is None
    engine.set_generation_epoch(2)
    step(engine, 1)
    engine.set_generation_epoch(3)
    run(engine)
    merged = future.result(timeout=0).merge()
    assert merged.policy_epoch == [(0, 1), (3 + 3 - 1, 2), (3 + 4 - 1, 3)]
    assert merged.kv_cache_epoch == [(0, 2), (3 + 4 - 1, 3)]
    assert FinishedRequestRecord.from_request(merged).num_evictions == 1


def test_an_eviction_without_a_new_epoch_stamps_the_cache_anew(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.set_generation_epoch(1)
    future = engine.add_request(0, PROMPT, greedy(4))
    step(engine, 1)
    engine.set_generation_epoch(2)
    engine._passes.evict_all()
    run(engine)
    merged = future.result(timeout=0).merge()
    assert (merged.policy_epoch, merged.kv_cache_epoch) == ([(0, 1), (3, 2)], [(0, 2)])


def test_epochs_survive_the_wire(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.set_generation_epoch(3)
    merged = engine.generate([PROMPT], greedy(2))[0].merge()
    back = DynamicInferenceRequest.deserialize(msgpack.unpackb(msgpack.packb(merged.serialize())))
    assert back.policy_epoch == back.kv_cache_epoch == [(0, 3)]
