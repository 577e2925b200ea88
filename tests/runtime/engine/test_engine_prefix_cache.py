"""An engine with cached prefixes gives the answers of one without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode, PrefixCachingEvictionPolicy
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.sampling.sampler import NO_TOKEN
from megatron_runtime.engine.text_generation_controller import StepOutput
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.inference_request import DynamicInferenceRequestRecord, compute_block_hashes_batched
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
GREEDY = SamplingParams(temperature=0, ignore_eos=True, num_tokens_to_generate=12)
STEM = list(b"the same beginning of all ")
PROMPTS = [[*STEM[: 5 * (i % 6)], i, i + 1, i + 2] for i in range(24)]
PARAMS = [SamplingParams(seed=i, temperature=i % 3, top_p=0.9, num_tokens_to_generate=10) for i in range(24)]


def tokens_of(records: list[DynamicInferenceRequestRecord]) -> list[list[int]]:
    return [record.merge().generated_tokens for record in records]


@pytest.mark.parametrize("policy", list(PrefixCachingEvictionPolicy))
@pytest.mark.parametrize(("blocks", "max_tokens"), [(300, 1024), (16, 24)])
def test_answers_are_the_same_with_and_without_the_cache(
    make_engine: MakeEngine, policy: PrefixCachingEvictionPolicy, blocks: int, max_tokens: int
) -> None:
    expected = tokens_of(make_engine(300).generate(PROMPTS, PARAMS))
    engine = make_engine(
        blocks,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=policy,
        max_tokens=max_tokens,
        max_requests=20,
    )
    for _ in range(2):
        assert tokens_of(engine.generate(PROMPTS, PARAMS)) == expected
        engine.check_integrity()
    stats = engine.stats()
    assert stats.prefix_hits_total > 0
    assert 0 < stats.cached_tokens_total < stats.prompt_tokens_total
    assert stats.kv_blocks_used == 0
    assert (stats.kv_blocks_evictable > 0) == (policy is PrefixCachingEvictionPolicy.LRU)


def test_two_hundred_requests_in_a_pool_for_ten_have_the_answers_of_single_requests(make_engine: MakeEngine) -> None:
    prompts = [[*STEM[: i % 20], i % 7, i % 11, i % 13] for i in range(200)]
    params = [SamplingParams(seed=i, temperature=i % 2, num_tokens_to_generate=8) for i in range(200)]
    alone = make_engine(300)
    expected = [tokens_of(alone.generate([prompt], each))[0] for prompt, each in zip(prompts, params, strict=True)]
    engine = make_engine(60, enable_prefix_caching=True, max_requests=50)
    assert tokens_of(engine.generate(prompts, params)) == expected
    engine.check_integrity()
    assert engine.stats().evictions_total > 0
    assert engine.stats().prefix_hits_total > 100


def test_logits_are_bitwise_equal_in_equal_passes(make_engine: MakeEngine) -> None:
    prompt = [*STEM[:16], 1, 2, 3]
    scored = SamplingParams(
        temperature=0.8,
        seed=4,
        ignore_eos=True,
        num_tokens_to_generate=12,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        top_n_logprobs=5,
    )
    chunked = make_engine(max_tokens=16, max_requests=1).generate([prompt], scored)[0].merge()
    engine = make_engine(enable_prefix_caching=True, max_requests=1)
    engine.generate([STEM[:16]], GREEDY)
    skipping = engine.generate([prompt], scored)[0].merge()
    assert skipping.num_cached_tokens == 16
    assert skipping.generated_tokens == chunked.generated_tokens
    assert skipping.generated_log_probs == chunked.generated_log_probs
    assert skipping.generated_top_n_logprobs == chunked.generated_top_n_logprobs


def test_a_request_reports_its_cached_prompt_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=True)
    cached = [engine.generate([STEM[:n]], GREEDY)[0].merge().num_cached_tokens for n in (10, 10, 12, 16, 16)]
    assert cached == [0, 8, 8, 12, 12]
    assert make_engine().generate([STEM], GREEDY)[0].merge().num_cached_tokens == 0


def test_prompts_with_different_salts_share_no_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(300, enable_prefix_caching=True)
    prompt = list(range(40))

    def cached(salt: str | None) -> int:
        (record,) = engine.generate([prompt], [SamplingParams(num_tokens_to_generate=2, cache_salt=salt)])
        return record.merge().num_cached_tokens

    first = [cached(salt) for salt in (None, "a", "b")]
    assert first == [0, 0, 0]
    again = [cached(salt) for salt in (None, "a", "b")]
    assert len(set(again)) == 1
    assert again[0] > 0
    engine.check_integrity()


def test_after_an_eviction_own_blocks_do_not_count_as_cached_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=True)
    future = engine.add_request(0, STEM, GREEDY)
    engine.step_modern()
    engine._passes.evict_all()
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()
    merged = future.result(timeout=0).merge()
    assert merged.num_cached_tokens == engine.stats().cached_tokens_total == 0
    assert merged.generated_tokens == tokens_of(make_engine().generate([STEM], GREEDY))[0]


def test_requests_carry_the_hashes_of_their_prompts(make_engine: MakeEngine) -> None:
    record = make_engine(enable_prefix_caching=True).generate([STEM], GREEDY)[0]
    assert record.merge().precomputed_block_hashes == compute_block_hashes_batched(torch.tensor(STEM), 4)
    assert make_engine().generate([STEM], GREEDY)[0].merge().precomputed_block_hashes == []


def test_log_probabilities_of_a_prompt_are_complete_whatever_is_cached(make_engine: MakeEngine) -> None:
    scored = SamplingParams(temperature=0, num_tokens_to_generate=4, return_log_probs=True, top_n_logprobs=2)
    expected = make_engine().generate([STEM], scored)[0].merge()
    engine = make_engine(enable_prefix_caching=True)
    engine.generate([STEM], GREEDY)
    found = engine.generate([STEM], scored)[0].merge()
    assert found.num_cached_tokens == 0
    assert found.prompt_log_probs == pytest.approx(expected.prompt_log_probs, abs=1e-5)
    assert found.generated_log_probs == pytest.approx(expected.generated_log_probs, abs=1e-5)


def test_prompts_that_collide_are_answered_as_if_they_did_not(make_engine: MakeEngine) -> None:
    first = [50] * 16
    second = [50 + 31, 49, *first[2:]]
    assert compute_block_hashes_batched(torch.tensor(first), 4) == compute_block_hashes_batched(torch.tensor(second), 4)
    engine = make_engine(enable_prefix_caching=True)
    records = [engine.generate([[*prompt, 1]], GREEDY)[0] for prompt in (first, second)]
    assert [record.merge().num_cached_tokens for record in records] == [0, 0]
    assert tokens_of(records) == tokens_of(make_engine().generate([[*first, 1], [*second, 1]], GREEDY))


def test_keys_and_values_of_old_weights_are_not_used_with_new_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=True)
    assert engine.controller.model.head is not None
    weight = engine.controller.model.head.table
    before = tokens_of(engine.generate([STEM], GREEDY))
    parameters = [each for each in engine.controller.model.parameters() if each is not weight and each.dim() > 1]
    originals = [each.data.clone() for each in parameters]
    try:
        for each in parameters:
            each.data.neg_()
        engine.invalidate_prefix_cache()
        after = engine.generate([STEM], GREEDY)
        assert after[0].merge().num_cached_tokens == 0
        assert tokens_of(after) == tokens_of(make_engine().generate([STEM], GREEDY)) != before
    finally:
        for each, original in zip(parameters, originals, strict=True):
            each.data.copy_(original)


@pytest.mark.parametrize(
    ("mode", "cached"),
    [
        (KVCacheManagementMode.PERSIST, 24),
        (KVCacheManagementMode.OFFLOAD, 24),
        (KVCacheManagementMode.RECOMPUTE, 0),
    ],
)
def test_a_suspension_keeps_the_cache_unless_its_memory_is_dropped(
    make_engine: MakeEngine, mode: KVCacheManagementMode, cached: int
) -> None:
    engine = make_engine(enable_prefix_caching=True, kv_cache_management_mode=mode)
    expected = tokens_of(engine.generate([STEM], GREEDY))
    engine.suspend()
    engine.resume()
    records = engine.generate([STEM], GREEDY)
    assert tokens_of(records) == expected
    assert records[0].merge().num_cached_tokens == cached


def test_aborting_a_request_keeps_a_shared_prefix_for_the_others(make_engine: MakeEngine) -> None:
    expected = tokens_of(make_engine().generate([STEM], GREEDY))
    engine = make_engine(enable_prefix_caching=True, prefix_caching_eviction_policy="ref_zero")
    engine.add_request(0, STEM, GREEDY)
    engine.step_modern()
    future = engine.add_request(1, STEM, GREEDY)
    engine.step_modern()
    engine.abort_request(0)
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()
    assert tokens_of([future.result(timeout=0)]) == expected
    assert engine.stats().prefix_hits_total == 1
    assert engine.context.allocator.num_evictable == 0


def test_blocks_with_values_that_are_not_finite_are_not_shared(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(enable_prefix_caching=True)
    monkeypatch.setattr(engine.controller, "run", lambda *_: StepOutput([NO_TOKEN], None))
    assert engine.generate([STEM], GREEDY)[0].merge().failed()
    monkeypatch.undo()
    assert engine.generate([STEM], GREEDY)[0].merge().num_cached_tokens == 0


def test_an_unknown_eviction_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="eviction_policy='fifo' is unknown; choose one of ref_zero, lru"):
        InferenceConfig(prefix_caching_eviction_policy="fifo")
