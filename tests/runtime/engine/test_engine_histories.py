"""Engines over random histories of requests, and log probabilities with every combination of features."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_support.log_probs import assert_log_probs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_runtime.config import KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.worker.attach import _coordinator_options
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.parallel.world import World
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
NaiveLogits = Callable[[list[int]], torch.Tensor]
NaiveGreedy = Callable[[list[int], int], list[int]]
STEM = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114]
PROMPTS = [STEM[: 3 + 2 * i] + [i] * (i % 3) for i in range(4)]
LENGTH = 10
ANSWERS: dict[int, list[int]] = {}
"""The answers to the prompts without interruptions."""


def actions() -> st.SearchStrategy[list[tuple[str, int]]]:
    names = ["add", "add", "step", "step", "step", "abort", "suspend", "forget", "reset"]
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 3)), min_size=5, max_size=40)


def perform(engine: DynamicInferenceEngine, action: str, which: int, ids: Any) -> None:
    if action == "add":
        shares = {"tenant": "other" if which == 1 else None, "body": str(which), "answers": (1, 1, 3, 9)[which]}
        params = SamplingParams(temperature=0, num_tokens_to_generate=LENGTH, ignore_eos=True, **shares)
        engine.add_request(next(ids) * 4 + which, PROMPTS[which], params)
    elif action == "abort":
        for tracked in list(engine._requests)[which : which + 1]:
            engine.abort_request(tracked.request_id)
    elif action == "suspend":
        engine.suspend()
        engine.check_integrity()
        engine.resume()
    elif action == "forget":
        engine.invalidate_prefix_cache()
    elif action == "reset":
        engine.reset()
        assert engine.stats().kv_blocks_used == 0


def step(engine: DynamicInferenceEngine) -> None:
    for record in engine.step_modern()["finished_request_records"]:
        merged = record.merge()
        expected = ANSWERS[merged.request_id % 4]
        made = len(merged.generated_tokens)
        assert merged.generated_tokens == (expected if merged.succeeded() else expected[:made])


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    script=actions(),
    blocks=st.sampled_from([7, 9, 40]),
    shared_rows=st.sampled_from([1, 2, None]),
    fields=st.fixed_dictionaries(
        {
            "max_tokens": st.sampled_from([4, 64]),
            "enable_prefix_caching": st.booleans(),
            "paused_buffer_size_gb": st.sampled_from([None, 1.0]),
            "kv_cache_management_mode": st.sampled_from(KVCacheManagementMode),
        }
    ),
)
def test_every_request_of_a_random_history_gets_the_right_answer_and_frees_its_resources(
    make_engine: MakeEngine,
    naive_greedy: NaiveGreedy,
    script: list[tuple[str, int]],
    blocks: int,
    shared_rows: int | None,
    fields: dict[str, Any],
) -> None:
    for which, prompt in enumerate(PROMPTS):
        ANSWERS.setdefault(which, naive_greedy(prompt, LENGTH))
    engine, ids = make_engine(blocks, max_requests=4, **fields), itertools.count()
    engine.scheduler.limits = replace(engine.scheduler.limits, shared_rows=shared_rows)
    for action, which in script:
        if action == "step":
            step(engine)
        else:
            perform(engine, action, which, ids)
        engine.check_integrity()
    # No request starves: one by one, they would need no fewer passes.
    for _ in range(sum(len(PROMPTS[3]) + LENGTH + 1 for _ in script)):
        if engine.has_unfinished_requests():
            step(engine)
    assert not engine.has_unfinished_requests()
    assert engine.stats().kv_blocks_used == 0


def scored(naive_logits: NaiveLogits, request: DynamicInferenceRequest, prompt: list[int]) -> list[float]:
    """Log probabilities of every token but the first, by one full forward pass."""
    tokens = prompt + request.generated_tokens
    table = naive_logits(tokens).log_softmax(-1)
    return [table[place - 1, token].item() for place, token in enumerate(tokens) if place > 0]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("max_tokens", [4, 64])
@pytest.mark.parametrize(("blocks", "paused"), [(10, None), (10, 1.0), (80, None)])
@pytest.mark.parametrize(("top_n", "skip"), [(0, False), (0, True), (3, False), (3, True)])
def test_log_probs_have_their_shape_and_values_with_chunks_caches_pauses_and_evictions(
    make_engine: MakeEngine,
    naive_logits: NaiveLogits,
    caching: bool,
    max_tokens: int,
    blocks: int,
    paused: float | None,
    top_n: int,
    skip: bool,
) -> None:
    params = SamplingParams(
        seed=3,
        num_tokens_to_generate=LENGTH,
        ignore_eos=True,
        return_log_probs=True,
        top_n_logprobs=top_n,
        skip_prompt_log_probs=skip,
    )
    engine = make_engine(
        blocks, max_tokens=max_tokens, max_requests=4, enable_prefix_caching=caching, paused_buffer_size_gb=paused
    )
    prompts = [PROMPTS[3], *PROMPTS, *PROMPTS]
    requests = [record.merge() for record in engine.generate(prompts, params)]
    engine.check_integrity()
    assert (engine.stats().prefix_hits_total > 0) == (caching and skip)
    if blocks == 10 and paused is None:
        assert engine.stats().evictions_total > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert_log_probs(request, params, len(prompt), scored(naive_logits, request, prompt))


def test_weight_updates_count_the_staleness_of_tokens_and_their_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(max_requests=1)
    params = SamplingParams(temperature=0, num_tokens_to_generate=6, ignore_eos=True)
    futures = [engine.add_request(i, PROMPTS[0], params) for i in range(2)]
    for _ in range(3):
        engine.step_modern()
    engine.increment_staleness()
    engine._passes.evict_all()
    engine.increment_staleness()
    while engine.has_unfinished_requests():
        engine.step_modern()
    first, second = (future.result(timeout=0).merge() for future in futures)
    assert first.policy_staleness is not None
    assert first.kv_cache_staleness is not None
    assert second.policy_staleness is not None
    assert second.kv_cache_staleness is not None
    assert first.policy_staleness.tolist() == [2] * (3 + 3) + [0] * 3
    assert second.policy_staleness.tolist() == [2] * 3 + [0] * 6
    assert first.kv_cache_staleness.tolist() == second.kv_cache_staleness.tolist() == [0] * 9


def test_a_cache_evicted_before_the_first_token_has_no_staleness(make_engine: MakeEngine) -> None:
    engine = make_engine(max_tokens=2, max_requests=1)
    future = engine.add_request(0, PROMPTS[0], SamplingParams(temperature=0, num_tokens_to_generate=2))
    engine.step_modern()
    engine.increment_staleness()
    engine._passes.evict_all()
    while engine.has_unfinished_requests():
        engine.step_modern()
    merged = future.result(timeout=0).merge()
    assert merged.policy_staleness is not None
    assert merged.kv_cache_staleness is not None
    assert merged.policy_staleness.tolist()[:3] == [1, 1, 1]
    assert set(merged.kv_cache_staleness.tolist()) == {0}


def test_the_times_of_an_evicted_request_include_all_its_segments(make_engine: MakeEngine) -> None:
    engine = make_engine()
    future = engine.add_request(0, PROMPTS[0], SamplingParams(temperature=0, num_tokens_to_generate=6))
    engine.step_modern()
    engine._passes.evict_all()
    while engine.has_unfinished_requests():
        engine.step_modern()
    record = future.result(timeout=0)
    merged = record.merge()
    assert len(record.requests) == 2
    assert record[1].event_add_engine is record[0].event_add_engine
    assert merged.ttft is not None
    assert merged.tpot is not None
    assert merged.latency == record.latency
    assert merged.latency == pytest.approx(merged.ttft + 5 * merged.tpot[0], rel=0.05)


@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_n_sigma": 1e-6}, {"temperature": 1e-4}], ids=str
)
def test_every_filter_reaches_the_sampler(
    make_engine: MakeEngine, naive_greedy: NaiveGreedy, fields: dict[str, Any]
) -> None:
    params = SamplingParams(**{"seed": 1, "temperature": 3.0, "num_tokens_to_generate": LENGTH, **fields})
    answer = make_engine().generate([PROMPTS[3]], params)[0].merge().generated_tokens
    free = SamplingParams(seed=1, temperature=3.0, num_tokens_to_generate=LENGTH)
    expected = naive_greedy(PROMPTS[3], len(answer))
    assert answer == expected != make_engine().generate([PROMPTS[3]], free)[0].merge().generated_tokens


def test_a_launched_coordinator_routes_as_the_engine_is_configured(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_caching_routing_alpha=0.25, prefix_caching_coordinator_policy="longest_prefix")
    options = _coordinator_options(engine, World(0, 1), "127.0.0.1", None, None)
    assert options.prefix_caching_routing_alpha == 0.25
    assert options.prefix_caching_coordinator_policy == "longest_prefix"


@pytest.mark.parametrize("offloads", [False, True])
def test_weights_are_offloaded_and_restored_if_configured(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, offloads: bool
) -> None:
    engine = make_engine(offload_weights=offloads)
    moves: list[str] = []
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(engine.controller.model, "to", lambda place: moves.append(str(place)))
    engine.suspend()
    moves.append("suspended")
    engine.resume()
    assert moves == (["cpu", "suspended", "cpu"] if offloads else ["suspended"])
