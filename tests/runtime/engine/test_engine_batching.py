"""The tokens of a request do not depend on the batch, the pool or the passes: they are those of a full forward pass."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import DynamicInferenceEventType, DynamicInferenceRequestRecord
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
NaiveGreedy = Callable[[list[int], int], list[int]]


def random_prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(256) for _ in range(chooser.randint(1, longest))] for _ in range(count)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, num_tokens_to_generate=count)


def tokens_of(records: list[DynamicInferenceRequestRecord]) -> list[list[int]]:
    return [record.merge().generated_tokens for record in records]


def test_a_single_request_gives_the_tokens_of_a_full_forward_pass(
    make_engine: MakeEngine, naive_greedy: NaiveGreedy
) -> None:
    for prompt in random_prompts(6):
        assert tokens_of(make_engine().generate([prompt], greedy(24))) == [naive_greedy(prompt, 24)]


@pytest.mark.parametrize("max_tokens", [16, 33, 1024])
@pytest.mark.parametrize("blocks", [16, 400])
def test_batching_chunking_and_eviction_do_not_change_tokens(
    make_engine: MakeEngine, naive_greedy: NaiveGreedy, max_tokens: int, blocks: int
) -> None:
    prompts = random_prompts(12)
    engine = make_engine(blocks, max_tokens=max_tokens)
    assert tokens_of(engine.generate(prompts, greedy(24))) == [naive_greedy(prompt, 24) for prompt in prompts]
    assert (engine.stats().evictions_total > 0) == (blocks == 16)
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def test_two_hundred_requests_are_served_by_a_pool_for_ten(make_engine: MakeEngine) -> None:
    prompts = random_prompts(200, longest=20)
    params = [SamplingParams(seed=i, temperature=i % 3, num_tokens_to_generate=12) for i in range(200)]
    alone = make_engine(8, max_requests=1)
    crowded = make_engine(80)
    assert tokens_of(crowded.generate(prompts, params)) == tokens_of(alone.generate(prompts, params))
    assert crowded.stats().evictions_total > 0
    assert alone.stats().evictions_total == 0


def test_requests_added_while_others_run_change_no_tokens(make_engine: MakeEngine, naive_greedy: NaiveGreedy) -> None:
    engine, prompts = make_engine(40, max_tokens=24), random_prompts(10)
    records = {}
    for request_id, prompt in enumerate(prompts):
        engine.add_request(request_id, prompt, greedy(16))
        records |= {record.request_id: record for record in engine.step_modern()["finished_request_records"]}
        engine.check_integrity()
    while engine.has_unfinished_requests():
        records |= {record.request_id: record for record in engine.step_modern()["finished_request_records"]}
        engine.check_integrity()
    assert [records[i].merge().generated_tokens for i in range(10)] == [naive_greedy(p, 16) for p in prompts]


def test_without_chunked_prefill_an_evicted_request_continues(
    make_engine: MakeEngine, naive_greedy: NaiveGreedy
) -> None:
    prompts = random_prompts(4, longest=8, seed=5)
    engine = make_engine(12, max_tokens=8, enable_chunked_prefill=False)
    assert tokens_of(engine.generate(prompts, greedy(30))) == [naive_greedy(prompt, 30) for prompt in prompts]
    assert engine.stats().evictions_total > 0


def test_a_step_reports_running_and_finished_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(max_requests=2)
    for request_id in (7, 3, 5):
        engine.add_request(request_id, [1, 2, 3], greedy(2))
    first = engine.step_modern()
    assert first["active_request_ids"] == [7, 3]
    assert first["finished_request_records"] == []
    assert first["step_time"] > 0
    second = engine.step_modern()
    assert [record.request_id for record in second["finished_request_records"]] == [7, 3]
    assert engine.step_modern()["active_request_ids"] == [5]
    assert engine.step_modern()["finished_request_records"][0].request_id == 5
    assert not engine.has_unfinished_requests()


def test_an_evicted_request_keeps_a_record_that_merges_to_one_answer(make_engine: MakeEngine) -> None:
    prompts = random_prompts(6, longest=16, seed=2)
    params = SamplingParams(temperature=0, num_tokens_to_generate=30, return_log_probs=True, top_n_logprobs=2)
    roomy = make_engine(200).generate(prompts, params)
    records = make_engine(16).generate(prompts, params)
    evicted = [record for record in records if len(record.requests) > 1]
    assert evicted
    for record, expected in zip(records, roomy, strict=True):
        merged, whole = record.merge(), expected.merge()
        assert merged.generated_tokens == whole.generated_tokens
        assert merged.generated_text == whole.generated_text
        assert merged.generated_length == 30
        assert merged.generated_log_probs == pytest.approx(whole.generated_log_probs, abs=1e-4)
        assert merged.prompt_log_probs == pytest.approx(whole.prompt_log_probs, abs=1e-4)
        assert len(merged.generated_top_n_logprobs or []) == 30
        kinds = [event.type for event in merged.events]
        assert kinds.count(DynamicInferenceEventType.ADD_ENGINE) == 1
        assert kinds.count(DynamicInferenceEventType.EVICT) + 1 == kinds.count(DynamicInferenceEventType.ADD_CONTEXT)
        assert kinds[-1] is DynamicInferenceEventType.FINISH
        assert record[-1].prompt_tokens is not None
        assert record[-1].sampling_params is not None
        assert record[-1].sampling_params.num_tokens_to_generate == len(record[-1].generated_tokens)
