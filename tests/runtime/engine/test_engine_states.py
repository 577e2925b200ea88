"""Engines over a model with recurrent layers: what they refuse, and the memory and the reset of the states.

`test_engine_bits` has evictions, suspensions and chunks of such a model, `test_engine_snapshots` its prefix cache, and
`test_recurrent_adapters` its adapters.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine_support.random_llama import random_llama
from engine_support.recurrent import KINDS, recurrent_model, state_bytes

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=12, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [20] * 11]


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return recurrent_model(**request.param)


def make_engine(model: Decoder, tokenizer: Tokenizer, **settings: Any) -> DynamicInferenceEngine:
    memory = 64 * KVCache.block_bytes(model.config, 4, torch.float32) + 8 * state_bytes(model)
    defaults = {"block_size_tokens": 4, "kv_cache_memory_bytes": memory, "max_requests": 8}
    return DynamicInferenceEngine.build(model, tokenizer, InferenceConfig(**{**defaults, **settings}))


def tokens_of(engine: DynamicInferenceEngine) -> list[list[int]]:
    return [list(record.merge().generated_tokens) for record in engine.generate(PROMPTS, GREEDY)]


def test_slots_of_ended_and_aborted_requests_are_used_again(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    engine = make_engine(model, byte_tokenizer)
    expected = tokens_of(engine)
    futures = [engine.add_request(100 + index, prompt, GREEDY) for index, prompt in enumerate(PROMPTS)]
    for _ in range(3):
        engine.step_modern()
    for index in range(3):
        assert engine.abort_request(100 + index)
    assert all(future.done() for future in futures)
    assert tokens_of(engine) == expected
    engine.check_integrity()


def test_speculation_is_refused(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigurationError, match=r"num_speculative_tokens=3: llama has recurrent .* set 0") as error:
        make_engine(model, byte_tokenizer, num_speculative_tokens=3)
    assert error.value.field == "num_speculative_tokens"


def test_the_states_are_a_part_of_the_pool(
    model: Decoder, byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    block = KVCache.block_bytes(model.config, 4, torch.float32)
    size = 10 * state_bytes(model)
    engine = make_engine(model, byte_tokenizer, kv_cache_memory_bytes=size, max_requests=5)
    assert engine.context.max_requests == 5
    assert engine.context.allocator.num_blocks == 5 * state_bytes(model) // block
    assert size - block < engine.context.kv_cache.num_bytes <= size
    with caplog.at_level(logging.INFO):
        assert (
            make_engine(model, byte_tokenizer, kv_cache_memory_bytes=size, max_requests=None).context.max_requests == 5
        )
    assert any("the pool has room for the states of 5 requests" in line for line in caplog.messages)
    with pytest.raises(ConfigurationError, match=f"recurrent states of one request, {state_bytes(model)} bytes; raise"):
        make_engine(model, byte_tokenizer, kv_cache_memory_bytes=state_bytes(model))


def test_a_pass_that_failed_after_it_changed_states_is_repeated(
    model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(make_engine(model, byte_tokenizer))
    engine = make_engine(model, byte_tokenizer)
    futures = [engine.add_request(index, prompt, GREEDY) for index, prompt in enumerate(PROMPTS)]
    for _ in range(4):
        engine.step_modern()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the second layer failed")

    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1], "forward", fail)
        with pytest.raises(RuntimeError, match="the second layer failed"):
            engine.step_modern()
    engine.check_integrity()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert [list(future.result(timeout=0).merge().generated_tokens) for future in futures] == expected


def test_a_model_with_states_drafts_for_no_other_model(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    served = random_llama(hidden=32, intermediate=48, std=0.3)
    settings = {"num_speculative_tokens": 2, "speculative_draft_model": model}
    with pytest.raises(ConfigurationError, match=r"speculative_draft_model: .* has recurrent layers, whose states"):
        DynamicInferenceEngine.build(served, byte_tokenizer, InferenceConfig(**settings))
