"""The prefix cache of models with recurrent layers: answers are those without it, and which tokens are skipped."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine_support.recurrent import KINDS, engine_of, recurrent_model, state_bytes

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode, PrefixCachingEvictionPolicy
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.sampling.sampler import NO_TOKEN
from megatron_runtime.engine.text_generation_controller import StepOutput
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

SYSTEM = list(b"You answer in one word. ")
PROMPTS = [[*SYSTEM[: 7 * (i % 4)], i, *range(i % 9), i % 5] for i in range(24)]
PARAMS = [
    SamplingParams(seed=i, temperature=i % 3, num_tokens_to_generate=10, return_log_probs=True, ignore_eos=True)
    for i in range(24)
]
for each in PARAMS:
    each.skip_prompt_log_probs = True
GREEDY = SamplingParams(
    temperature=0, num_tokens_to_generate=12, ignore_eos=True, return_log_probs=True, skip_prompt_log_probs=True
)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return recurrent_model(**request.param)


Numbers = tuple[list[int], list[float]]


def numbers_of(request: DynamicInferenceRequest) -> Numbers:
    """The tokens of an answer and their log probabilities."""
    assert request.generated_log_probs is not None
    return list(request.generated_tokens), list(request.generated_log_probs)


def serve(engine: DynamicInferenceEngine, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[int, Numbers]:
    """The cached tokens of a request that is alone, and the numbers of its answer."""
    request = engine.generate([prompt], params)[0].merge()
    engine.check_integrity()
    return request.num_cached_tokens, numbers_of(request)


def finish(engine: DynamicInferenceEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()


@pytest.mark.parametrize("policy", list(PrefixCachingEvictionPolicy))
@pytest.mark.parametrize(("blocks", "snapshots", "max_tokens"), [(120, 10, 1024), (24, 2, 24)])
def test_answers_are_the_same_with_and_without_the_cache(
    model: Decoder,
    byte_tokenizer: Tokenizer,
    policy: PrefixCachingEvictionPolicy,
    blocks: int,
    snapshots: int,
    max_tokens: int,
) -> None:
    def answers(engine: DynamicInferenceEngine) -> list[Numbers]:
        return [numbers_of(record.merge()) for record in engine.generate(PROMPTS, PARAMS)]

    expected = answers(engine_of(model, byte_tokenizer, snapshots=0, blocks=300))
    settings: dict[str, Any] = {"prefix_caching_eviction_policy": policy, "max_tokens": max_tokens}
    engine = engine_of(model, byte_tokenizer, snapshots=snapshots, blocks=blocks, **settings)
    for _ in range(2):
        assert answers(engine) == expected
        engine.check_integrity()
    stats = engine.stats()
    assert stats.prefix_hits_total > 0
    assert 0 < stats.cached_tokens_total < stats.prompt_tokens_total
    assert stats.kv_blocks_used == 0


def test_turns_of_chats_and_prompts_with_the_same_beginning_skip_it(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    without = engine_of(model, byte_tokenizer, snapshots=0, blocks=80)
    engine = engine_of(model, byte_tokenizer, snapshots=6, blocks=80)
    chats = [[*SYSTEM, *[token] * 9] for token in range(3)]
    cached = []
    for prompt in chats:
        found, numbers = serve(engine, prompt)
        assert (0, numbers) == serve(without, prompt)
        cached.append(found)
        second = [*prompt, *numbers[0], 1, 2, 3]
        found, numbers = serve(engine, second)
        assert (0, numbers) == serve(without, second)
        cached.append(found)
    # The system prompt has 24 tokens, those before an answer 33.
    assert cached == [0, 32, 0, 32, 24, 32]
    assert engine.stats().cached_tokens_total == sum(cached)
    assert engine.stats().prefix_hits_total == 4


def test_prompts_with_different_salts_share_no_states(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    engine = engine_of(model, byte_tokenizer, snapshots=6)
    salted = [SamplingParams(num_tokens_to_generate=2, cache_salt=salt, return_log_probs=True) for salt in (None, "a")]
    for each in salted:
        each.skip_prompt_log_probs = True
    assert [serve(engine, SYSTEM, each)[0] for each in salted] == [0, 0]
    assert [serve(engine, SYSTEM, each)[0] for each in salted] == [20, 20]


@pytest.mark.parametrize(
    ("mode", "cached"),
    [(KVCacheManagementMode.PERSIST, 20), (KVCacheManagementMode.OFFLOAD, 20), (KVCacheManagementMode.RECOMPUTE, 0)],
)
def test_a_suspension_keeps_the_snapshots_unless_their_memory_is_dropped(
    model: Decoder, byte_tokenizer: Tokenizer, mode: KVCacheManagementMode, cached: int
) -> None:
    engine = engine_of(model, byte_tokenizer, snapshots=4, kv_cache_management_mode=mode)
    _, numbers = serve(engine, SYSTEM)
    future = engine.add_request(100, [*SYSTEM, 1, 2, 3], GREEDY)
    engine.step_modern()
    engine.suspend()
    engine.resume()
    assert serve(engine, SYSTEM) == (cached, numbers)
    expected = serve(engine_of(model, byte_tokenizer, snapshots=0), [*SYSTEM, 1, 2, 3])[1]
    assert numbers_of(future.result(timeout=0).merge()) == expected


def test_states_of_old_weights_are_not_used_with_new_ones(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    engine = engine_of(model, byte_tokenizer, snapshots=4, max_tokens=8)
    before = serve(engine, SYSTEM)
    assert model.config.recurrent is not None
    layer = model.layers[min(model.config.recurrent.layers)]
    parameters = [each for each in layer.parameters() if each.dim() > 1]
    assert parameters
    engine.add_request(100, [7, *SYSTEM], GREEDY)
    engine.step_modern()  # computes a part of its prompt with the old weights
    originals = [each.data.clone() for each in parameters]
    try:
        for each in parameters:
            each.data.neg_()
        engine.invalidate_prefix_cache()
        finish(engine)
        without = engine_of(model, byte_tokenizer, snapshots=0)
        for prompt in (SYSTEM, [7, *SYSTEM]):
            after = serve(engine, prompt)
            assert after == serve(without, prompt)
            assert after[1] != before[1]
    finally:
        for each, original in zip(parameters, originals, strict=True):
            each.data.copy_(original)


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("it failed")


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("place", ["pass", "load", "store"])
def test_a_failure_leaves_no_wrong_snapshot(
    model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, steps: int, place: str
) -> None:
    prompts = [[*SYSTEM, *[token] * 9] for token in range(4)]
    without = engine_of(model, byte_tokenizer, snapshots=0)
    expected = [serve(without, prompt)[1] for prompt in prompts]
    engine = engine_of(model, byte_tokenizer, snapshots=4)
    for prompt in prompts[:2]:
        serve(engine, prompt)
    futures = [engine.add_request(100 + row, prompt, GREEDY) for row, prompt in enumerate(prompts)]
    for _ in range(steps):
        engine.step_modern()
    targets = {
        "pass": (model.layers[-1], "forward"),
        "load": (KVCache, "load_snapshot"),
        "store": (KVCache, "store_snapshot"),
    }
    failed = False
    with monkeypatch.context() as patch:
        patch.setattr(*targets[place], fail)
        try:
            engine.step_modern()
        except RuntimeError:
            failed = True
    assert failed or (place != "pass" and steps)
    engine.check_integrity()
    finish(engine)
    assert [numbers_of(future.result(timeout=0).merge()) for future in futures] == expected
    assert [serve(engine, prompt)[1] for prompt in prompts] == expected


def test_states_that_are_not_finite_are_not_used(
    model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, byte_tokenizer, snapshots=4)
    engine.add_request(0, SYSTEM, GREEDY)
    engine.step_modern()  # leaves the snapshot
    with monkeypatch.context() as patch:
        patch.setattr(engine.controller, "run", lambda *_: StepOutput([NO_TOKEN], None))
        finish(engine)
    assert serve(engine, SYSTEM)[0] == 0


def test_the_states_do_not_depend_on_which_request_left_them(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    engine = engine_of(model, byte_tokenizer, snapshots=8, blocks=100, max_tokens=11)
    prompts = [[*SYSTEM, *[token] * 9] for token in range(6)]
    without = engine_of(model, byte_tokenizer, snapshots=0)
    expected = [serve(without, prompt)[1] for prompt in prompts]
    assert [numbers_of(record.merge()) for record in engine.generate(prompts, GREEDY)] == expected
    # The first has none of them, the second meets its blocks, and all others wait for the snapshot of the second.
    assert engine.stats().prefix_hits_total == 4


def test_without_room_for_a_snapshot_the_cache_is_off_and_the_log_says_why(
    model: Decoder, byte_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    block = KVCache.block_bytes(model.config, 4, torch.float32)
    settings = {"block_size_tokens": 4, "enable_prefix_caching": True}
    memory = 2 * state_bytes(model) + 4 * block
    chosen = InferenceConfig(kv_cache_memory_bytes=memory, max_requests=2, **settings)
    with caplog.at_level(logging.INFO):
        engine = DynamicInferenceEngine.build(model, byte_tokenizer, chosen)
    (line,) = [line for line in caplog.messages if "enable_prefix_caching=False" in line]
    assert f"{state_bytes(model)} bytes" in line
    assert line.endswith("raise kv_cache_memory_bytes or lower max_requests=2")
    assert not engine.config.enable_prefix_caching
    assert engine.context.allocator.prefixes is None
    assert serve(engine, [1, 2, 3])[0] == 0


def test_snapshots_are_a_part_of_the_pool(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    size = 12 * state_bytes(model)
    config = InferenceConfig(block_size_tokens=4, enable_prefix_caching=True, kv_cache_memory_bytes=size)
    context = DynamicInferenceEngine.build(model, byte_tokenizer, config).context
    assert (context.max_requests, context.limits.num_snapshots) == (4, 2)
    assert size - KVCache.block_bytes(model.config, 4, torch.float32) < context.kv_cache.num_bytes <= size
