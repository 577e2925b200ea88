"""Suspension, resumption, and the sizes of the engine's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError, EngineSuspendedError
from megatron_runtime.inference_request import DynamicInferenceEventType
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
PARAMS = [SamplingParams(seed=i, temperature=i % 2, num_tokens_to_generate=20) for i in range(4)]
PROMPTS = [[i + 1] * (3 + 5 * i) for i in range(4)]


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
@pytest.mark.parametrize("steps_before", [1, 2, 9])
def test_requests_in_flight_survive_a_suspension_with_the_same_tokens(
    make_engine: MakeEngine, mode: KVCacheManagementMode, steps_before: int
) -> None:
    expected = [record.merge().generated_tokens for record in make_engine().generate(PROMPTS, PARAMS)]
    engine = make_engine(max_requests=3, max_tokens=16, kv_cache_management_mode=mode)
    futures = [engine.add_request(i, PROMPTS[i], PARAMS[i]) for i in range(3)]
    for _ in range(steps_before):
        engine.step_modern()
    engine.suspend()
    engine.check_integrity()
    assert engine.is_suspended
    assert engine.context.kv_cache.is_resident == (mode is KVCacheManagementMode.PERSIST)
    futures.append(engine.add_request(3, PROMPTS[3], PARAMS[3]))
    with pytest.raises(EngineSuspendedError):
        engine.step_modern()
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()
    assert [future.result(timeout=0).merge().generated_tokens for future in futures] == expected


def test_recomputing_frees_every_block_and_adds_events(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_management_mode="recompute")
    engine.add_request(0, PROMPTS[0], PARAMS[0])
    engine.step_modern()
    engine.suspend()
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().waiting == 1
    engine.resume()
    while engine.has_unfinished_requests():
        records = engine.step_modern()["finished_request_records"]
    assert [event.type for event in records[0].merge().events].count(DynamicInferenceEventType.EVICT) == 1


def test_suspending_and_resuming_twice_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_management_mode="offload", offload_weights=True)
    engine.resume()
    engine.suspend()
    engine.suspend()
    engine.resume()
    engine.resume()
    assert engine.generate(PROMPTS, PARAMS)[0][-1].succeeded()


def test_a_suspended_engine_reports_finished_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(0, PROMPTS[0], PARAMS[0])
    engine.step_modern()
    engine.suspend()
    engine.abort_request(0)
    engine.add_request(1, [], PARAMS[0])
    records, partials = engine.pop_reports()
    assert [record[-1].finish_reason for record in records] == ["abort", "error"]
    assert partials == {}
    assert not engine.has_unfinished_requests()
    assert engine.pop_reports() == ([], {})


def test_the_pool_has_the_configured_size_but_not_more_than_can_be_used(
    tiny_model: Decoder, byte_tokenizer: Tokenizer
) -> None:
    def blocks(**settings: object) -> int:
        engine = DynamicInferenceEngine.build(tiny_model, byte_tokenizer, InferenceConfig(**settings))
        assert engine.context.kv_cache.num_blocks == engine.stats().kv_blocks_total
        return engine.stats().kv_blocks_total

    each = KVCache.block_bytes(tiny_model.config, 16, torch.float32)
    assert blocks(kv_cache_memory_bytes=10 * each + 1) == 10
    assert blocks(buffer_size_gb=10 * each / 2**30) == 10
    assert blocks(max_requests=3, max_sequence_length=100) == 3 * 7


def test_a_pool_without_a_single_block_is_refused_with_a_fix(tiny_model: Decoder, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigurationError, match=r"kv_cache_memory_bytes=100 .* block of 4096 bytes .* raise it") as e:
        DynamicInferenceEngine.build(tiny_model, byte_tokenizer, InferenceConfig(kv_cache_memory_bytes=100))
    assert e.value.field == "kv_cache_memory_bytes"


def test_limits_derive_from_the_configuration(make_engine: MakeEngine) -> None:
    context = make_engine().context
    assert (context.max_requests, context.max_tokens, context.max_sequence_length) == (64, 1024, 512)
    assert make_engine(max_tokens=7).context.max_requests == 7
    assert make_engine(max_requests=2000).context.max_tokens == 2000
    assert make_engine(max_sequence_length=None).context.max_sequence_length == 512
    assert make_engine(max_sequence_length=100).context.max_sequence_length == 100


def test_a_pass_that_fails_in_the_model_can_be_repeated(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_engine().generate(PROMPTS, PARAMS)
    engine = make_engine(14)
    futures = [engine.add_request(i, PROMPTS[i], PARAMS[i]) for i in range(4)]
    healthy, passes = engine.controller.run, 0

    def run(*arguments: object) -> object:
        nonlocal passes
        passes += 1
        if passes % 3 == 0:
            raise MemoryError("for a moment")
        return healthy(*arguments)

    monkeypatch.setattr(engine.controller, "run", run)
    while engine.has_unfinished_requests():
        try:
            engine.step_modern()
        except MemoryError:
            engine.check_integrity()
    tokens = [future.result(timeout=0).merge().generated_tokens for future in futures]
    assert tokens == [record.merge().generated_tokens for record in expected]
