"""The counts of a context, and the groups and states of an engine without a coordinator, as Megatron's callers read
them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.headers import EngineState
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.rank_groups import RankGroup, RankGroups
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = list(range(5, 15))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, num_tokens_to_generate=count, ignore_eos=True)


def test_the_context_counts_passes_and_the_prompt_tokens_that_they_compute(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate([PROMPT, PROMPT[:3]], greedy(4))
    assert (engine.context.step_count, engine.context.lifetime_prefill_token_count) == (4, 13)


def test_cached_tokens_of_a_prompt_are_not_counted(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=True, prefix_caching_eviction_policy="lru")
    engine.generate([PROMPT], greedy(1))
    first = engine.context.lifetime_prefill_token_count
    (record,) = engine.generate([PROMPT], greedy(1))
    assert record[0].num_cached_tokens > 0
    assert engine.context.lifetime_prefill_token_count == first + len(PROMPT) - record[0].num_cached_tokens


def test_the_tokens_of_an_evicted_request_are_counted_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(0, PROMPT, greedy(5))
    for _ in range(3):
        engine.step_modern()
    assert engine.context.lifetime_prefill_token_count == 10
    engine._passes.evict_all()
    engine.step_modern()
    engine.step_modern()
    assert engine.context.lifetime_prefill_token_count == 10 + 13


def test_chunks_of_a_prompt_are_counted_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_tokens=4, max_requests=2)
    engine.generate([PROMPT], greedy(2))
    assert (engine.context.step_count, engine.context.lifetime_prefill_token_count) == (4, 10)


def test_a_reset_begins_to_count_anew(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate([PROMPT], greedy(2))
    engine.reset()
    assert (engine.context.step_count, engine.context.lifetime_prefill_token_count) == (0, 0)


def test_an_engine_without_a_coordinator_is_running_until_it_is_suspended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    events = engine._state_events
    assert [state for state, event in events.items() if event.is_set()] == [EngineState.RUNNING]
    engine.suspend()
    assert [state for state, event in events.items() if event.is_set()] == [EngineState.SUSPENDED]


async def test_an_event_that_is_set_does_not_wait(make_engine: MakeEngine) -> None:
    assert await make_engine().running.wait() is True


def test_one_rank_is_alone_in_every_group(make_engine: MakeEngine) -> None:
    groups = make_engine().pg_collection
    assert groups == RankGroups(*[RankGroup(0, 1)] * 5)
    assert (groups.dp.rank(), groups.dp.size()) == (0, 1)


def test_a_rank_knows_its_place_in_the_groups_of_its_replica_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 7)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    groups = RankGroups.of(ParallelSizes(tensor=2, pipeline=2, data=2).position(7))
    assert (groups.tp, groups.pp, groups.mp) == (RankGroup(1, 2), RankGroup(1, 2), RankGroup(3, 4))
    assert (groups.ep, groups.dp) == (RankGroup(0, 1), RankGroup(1, 2))


def test_the_process_groups_of_a_model_on_one_rank_are_those_of_the_engine(make_engine: MakeEngine) -> None:
    groups = SimpleNamespace(tp=RankGroup(0, 1), pp=RankGroup(0, 1), ep=None, dp=RankGroup(1, 2))
    assert make_engine(pg_collection=groups).pg_collection is groups


def test_the_process_groups_of_a_divided_model_are_refused() -> None:
    groups = SimpleNamespace(tp=RankGroup(1, 2), pp=RankGroup(0, 1))
    with pytest.raises(ConfigurationError, match="pg_collection"):
        InferenceConfig(pg_collection=groups)
