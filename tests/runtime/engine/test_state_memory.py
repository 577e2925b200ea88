"""Megatron's settings for the memory of recurrent states: requests and snapshots that fit, and the same answers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine_support.random_llama import random_llama
from engine_support.recurrent import BLOCK, KINDS, recurrent_model, state_bytes

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.cache_layout import CacheLayout, StateMemory
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(
    temperature=0, num_tokens_to_generate=10, ignore_eos=True, return_log_probs=True, skip_prompt_log_probs=True
)
PROMPTS = [[*range(20), row] for row in range(12)]
UNITS = 20
"""States of requests that the memory of these tests has room for."""


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return recurrent_model(**request.param)


def make_engine(model: Decoder, tokenizer: Tokenizer, **settings: Any) -> DynamicInferenceEngine:
    defaults = {"block_size_tokens": BLOCK, "kv_cache_memory_bytes": UNITS * state_bytes(model)}
    return DynamicInferenceEngine.build(model, tokenizer, InferenceConfig(**(defaults | settings)))


def gigabytes(count: float) -> float:
    return count / 2**30


def answers(engine: DynamicInferenceEngine) -> list[tuple[list[int], list[float]]]:
    requests = [record.merge() for record in engine.generate(PROMPTS, GREEDY)]
    engine.check_integrity()
    return [(list(each.generated_tokens), list(each.generated_log_probs or [])) for each in requests]


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 10),
        ({"mamba_memory_ratio": 0.2}, 4),
        ({"mamba_memory_ratio": 0.55}, 11),
        ({"mamba_memory_ratio": 0.8, "max_requests": 6}, 6),
        ({"mamba_memory_ratio": 0.2, "max_requests": 6}, 4),
    ],
)
def test_the_ratio_limits_the_requests_that_run_together(
    model: Decoder, byte_tokenizer: Tokenizer, settings: dict[str, Any], most: int
) -> None:
    engine = make_engine(model, byte_tokenizer, **settings)
    limits = engine.context.limits
    assert limits.max_requests == most
    block = KVCache.block_bytes(model.config, BLOCK, torch.float32)
    assert limits.num_blocks == (UNITS - most) * state_bytes(model) // block
    short = SamplingParams(temperature=0, num_tokens_to_generate=3, ignore_eos=True)  # the tokens of one block
    futures = [engine.add_request(index, [index], short) for index in range(16)]
    running = 0
    while engine.has_unfinished_requests():
        engine.step_modern()
        running = max(running, engine.stats().running)
    assert running == most
    assert all(future.done() for future in futures)


@pytest.mark.parametrize("snapshots", [1, 2, 5])
def test_the_memory_of_snapshots_is_their_number(model: Decoder, byte_tokenizer: Tokenizer, snapshots: int) -> None:
    memory = gigabytes((snapshots + 0.5) * state_bytes(model))
    settings = {"enable_prefix_caching": True, "prefix_caching_mamba_gb": memory, "mamba_memory_ratio": 0.3}
    engine = make_engine(model, byte_tokenizer, **settings)
    limits = engine.context.limits
    assert limits.num_snapshots == snapshots
    assert limits.max_requests == int(0.3 * (UNITS - snapshots))
    assert engine.context.kv_cache.num_bytes <= UNITS * state_bytes(model)
    prefixes = engine.context.allocator.prefixes
    assert prefixes is not None
    for prompt in PROMPTS:
        # Without a common beginning, each prompt leaves one snapshot.
        engine.generate([[prompt[-1] + 100, *prompt]], GREEDY)
    assert prefixes._snapshots is not None
    assert len(prefixes._snapshots) == snapshots


def test_the_bits_of_answers_do_not_depend_on_the_settings(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    expected = answers(make_engine(model, byte_tokenizer))
    hits = []
    for snapshots in (0, 1, 4):
        memory = gigabytes(snapshots * state_bytes(model))
        for ratio in (None, 0.1, 0.7):
            settings = {"prefix_caching_mamba_gb": memory, "mamba_memory_ratio": ratio}
            engine = make_engine(model, byte_tokenizer, enable_prefix_caching=True, **settings)
            assert answers(engine) == answers(engine) == expected
            hits.append(engine.stats().prefix_hits_total > 0)
    assert hits == [False] * 3 + [True] * 6


def test_memory_of_snapshots_is_beside_a_buffer_and_a_part_of_all_memory(
    model: Decoder, byte_tokenizer: Tokenizer
) -> None:
    state = state_bytes(model)
    settings = {"enable_prefix_caching": True, "prefix_caching_mamba_gb": gigabytes(4 * state)}
    beside = {"kv_cache_memory_bytes": None, "buffer_size_gb": gigabytes(UNITS * state)}
    caches = [make_engine(model, byte_tokenizer, **settings, **size).context.limits for size in (beside, {})]
    assert [(each.max_requests, each.num_snapshots) for each in caches] == [(10, 4), (8, 4)]
    without = make_engine(model, byte_tokenizer, **beside, prefix_caching_mamba_gb=gigabytes(4 * state))
    assert (without.context.max_requests, without.context.limits.num_snapshots) == (10, 0)


def test_without_snapshots_the_cache_is_off(
    model: Decoder, byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = make_engine(model, byte_tokenizer, enable_prefix_caching=True, prefix_caching_mamba_gb=0)
    assert "enable_prefix_caching=False: prefix_caching_mamba_gb=0" in caplog.messages
    assert not engine.config.enable_prefix_caching
    assert engine.context.max_requests == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mamba_memory_ratio": 0.01}, "mamba_memory_ratio=0.01: this part of .* raise it, or give the KV cache more"),
        ({"prefix_caching_mamba_gb": 1e-9}, "prefix_caching_mamba_gb=1e-09: a copy of .* set as much or more, or 0"),
        ({"prefix_caching_mamba_gb": 1.0}, r"prefix_caching_mamba_gb=1.0: of the pool's .* lower it, or give"),
    ],
)
def test_settings_without_room_are_refused(
    model: Decoder, byte_tokenizer: Tokenizer, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as error:
        make_engine(model, byte_tokenizer, enable_prefix_caching=True, **settings)
    assert error.value.field == next(iter(settings))


def test_a_model_without_recurrent_layers_has_no_ratio(byte_tokenizer: Tokenizer) -> None:
    model = random_llama(hidden=32, intermediate=48, std=0.3)
    model.prepare()
    size = 100 * KVCache.block_bytes(model.config, BLOCK, torch.float32)
    settings = {"kv_cache_memory_bytes": size, "block_size_tokens": BLOCK, "enable_prefix_caching": True}
    with pytest.raises(ConfigurationError, match=r"mamba_memory_ratio=0.5: llama has no recurrent layers; leave it"):
        DynamicInferenceEngine.build(model, byte_tokenizer, InferenceConfig(mamba_memory_ratio=0.5, **settings))
    config = InferenceConfig(prefix_caching_mamba_gb=50, **settings)  # without effect, as in Megatron
    engine = DynamicInferenceEngine.build(model, byte_tokenizer, config)
    assert engine.context.limits.num_blocks == 100
    assert engine.config.enable_prefix_caching


LAYOUT = CacheLayout(num_layers=1, heads=1, key_width=8, value_width=8, state_bytes=1000)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (StateMemory(), (4, 19, 1)),
        (StateMemory(ratio=0.25), (2, 23, 2)),
        (StateMemory(ratio=0.999), (7, 11, 0)),
        (StateMemory(snapshot_gb=3500 / 2**30), (3, 15, 3)),
        (StateMemory(snapshot_gb=0), (5, 19, 0)),
        (StateMemory(ratio=0.5, snapshot_gb=4000 / 2**30), (3, 11, 4)),
    ],
)
def test_a_pool_is_divided_as_the_user_sets_it(memory: StateMemory, expected: tuple[int, int, int]) -> None:
    assert LAYOUT.divide(10000, 256, 100, is_chosen=False, has_snapshots=True, memory=memory) == expected
