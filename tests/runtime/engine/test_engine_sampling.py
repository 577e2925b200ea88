"""The effect of each sampling field on whole answers, alone and under load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_support.log_probs import assert_log_probs

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError, InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
NaiveLogits = Callable[[list[int]], torch.Tensor]
PROMPT = [72, 101, 108, 108, 111]
LENGTH = 16
ALL: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.8,
    "presence_penalty": -0.6,
    "logit_bias": {72: 4.0, 30: -100.0},
    "min_tokens": 6,
}


def edited(logits: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The logits of one position after the edits, by the definitions of the fields."""
    logits = logits.clone()
    counts = Counter(answer)
    for token in range(len(logits)):
        logits[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in counts or token in prompt:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (token in counts)
        if len(answer) < params.min_tokens and token in {*(params.stop_token_ids or ()), 256}:
            logits[token] = -torch.inf
    return logits


def oracle(naive_logits: NaiveLogits, params: SamplingParams, count: int) -> list[int]:
    """The most likely tokens, each from a single pass."""
    answer: list[int] = []
    while len(answer) < count:
        answer.append(int(edited(naive_logits(PROMPT + answer)[-1], params, PROMPT, answer).argmax()))
    return answer


def serve(engine: DynamicInferenceEngine, params: SamplingParams) -> DynamicInferenceRequest:
    return engine.generate([PROMPT], params)[0].merge()


def serve_under_pressure(
    make_engine: MakeEngine, params: list[SamplingParams], **settings: Any
) -> list[DynamicInferenceRequest]:
    """Every request with the same prompt, prefilled in chunks, in a pool that is too small for them."""
    engine = make_engine(10, max_tokens=4, max_requests=4, **settings)
    requests = [record.merge() for record in engine.generate([PROMPT] * len(params), params)]
    engine.check_integrity()
    assert engine.stats().evictions_total > 0
    return requests


@pytest.mark.parametrize("fields", [*({name: value} for name, value in ALL.items()), ALL], ids=lambda f: "+".join(f))
def test_every_sampling_field_has_its_defined_effect(
    make_engine: MakeEngine, naive_logits: NaiveLogits, fields: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, num_tokens_to_generate=LENGTH, ignore_eos=True, **fields)
    expected = oracle(naive_logits, params, LENGTH)
    assert serve(make_engine(), params).generated_tokens == expected
    crowd = serve_under_pressure(make_engine, [params, SamplingParams(temperature=0, num_tokens_to_generate=20)] * 3)
    assert all(request.generated_tokens == expected for request in crowd[::2])


def test_requests_without_penalties_are_not_affected_by_others(make_engine: MakeEngine) -> None:
    plain = SamplingParams(seed=4, num_tokens_to_generate=LENGTH)
    alone = serve(make_engine(), plain).generated_tokens
    others = SamplingParams(seed=4, num_tokens_to_generate=LENGTH, **ALL)
    crowd = make_engine().generate([PROMPT] * 3, [others, plain, others])
    assert crowd[1].merge().generated_tokens == alone
    assert crowd[0].merge().generated_tokens == crowd[2].merge().generated_tokens != alone


@pytest.mark.parametrize("made", [1, 5, 11])
def test_an_answer_with_penalties_continues_equally_on_another_engine(make_engine: MakeEngine, made: int) -> None:
    params = SamplingParams(seed=5, num_tokens_to_generate=LENGTH, **ALL)
    whole = serve(make_engine(), params).generated_tokens
    engine = make_engine(max_tokens=3, max_requests=2)
    engine.add_request(0, PROMPT, params, generated=whole[:made])
    records = []
    while engine.has_unfinished_requests():
        records += engine.step_modern()["finished_request_records"]
    assert records[0].merge().generated_tokens == whole
    assert [request.generated_tokens for request in serve_under_pressure(make_engine, [params] * 4)] == [whole] * 4


def test_no_stop_token_is_generated_before_min_tokens(make_engine: MakeEngine, naive_logits: NaiveLogits) -> None:
    free = oracle(naive_logits, SamplingParams(), 1)
    params = SamplingParams(temperature=0, num_tokens_to_generate=40, min_tokens=4, stop_token_ids=free)
    request = serve(make_engine(), params)
    assert request.generated_tokens[:4] == oracle(naive_logits, params, 4)
    assert free[0] not in request.generated_tokens[:4]
    biased = SamplingParams(temperature=0, num_tokens_to_generate=9, min_tokens=4, logit_bias={256: 100.0})
    answer = serve(make_engine(), biased)
    assert (len(answer.generated_tokens), answer.generated_tokens[-1], answer.finish_reason) == (5, 256, "stop")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_text_that_is_complete_too_early_is_passed_over(make_engine: MakeEngine, streaming: bool) -> None:
    # The bias makes every token an "a".
    params = SamplingParams(
        temperature=0,
        logit_bias={97: 100.0},
        num_tokens_to_generate=20,
        stop=["aa"],
        min_tokens=5,
        streaming=streaming,
    )
    engine = make_engine()
    engine.add_request(0, PROMPT, params)
    seen: list[int] = []
    records: list[Any] = []
    while engine.has_unfinished_requests():
        result = engine.step_modern()
        seen += [token for partial in result["partial_outputs"].values() for token in partial.new_tokens]
        records += result["finished_request_records"]
    request = records[0].merge()
    assert (request.generated_text, request.finish_reason) == ("aaaa", "stop")
    assert seen == (request.generated_tokens if streaming else [])


def test_streams_with_penalties_and_stop_texts_are_equal_under_load_and_alone(make_engine: MakeEngine) -> None:
    params = SamplingParams(
        seed=3,
        temperature=1.2,
        num_tokens_to_generate=30,
        stop=["aba", "b"],
        streaming=True,
        logit_bias={97: 12.0, 98: 9},
    )
    params.add_attributes({"frequency_penalty": 0.2, "repetition_penalty": 1.2, "min_tokens": 7})
    alone = serve(make_engine(), params)
    engine = make_engine(14, max_tokens=4, max_requests=4)
    for request_id in range(4):
        engine.add_request(request_id, PROMPT, params)
    seen: dict[int, list[int]] = {request_id: [] for request_id in range(4)}
    answers = []
    while engine.has_unfinished_requests():
        result = engine.step_modern()
        for request_id, partial in result["partial_outputs"].items():
            seen[request_id] += partial.new_tokens
        answers += [record.merge() for record in result["finished_request_records"]]
    assert engine.stats().evictions_total > 0
    for answer in answers:
        assert (answer.generated_text, answer.finish_reason) == (alone.generated_text, alone.finish_reason)
        assert seen[answer.request_id] == answer.generated_tokens == alone.generated_tokens


def test_min_tokens_beyond_the_room_applies_to_the_end(make_engine: MakeEngine) -> None:
    request = serve(make_engine(max_sequence_length=9), SamplingParams(min_tokens=50))
    assert (len(request.generated_tokens), request.finish_reason) == (4, "length")
    assert request.sampling_params is not None
    assert SamplingParams.deserialize(request.sampling_params.serialize()) == request.sampling_params


def test_a_bias_on_an_unknown_token_is_refused_by_name(make_engine: MakeEngine) -> None:
    request = serve(make_engine(), SamplingParams(logit_bias={257: 1.0}))
    assert isinstance(request.error, InvalidRequestError)
    assert request.error.field == "logit_bias"
    assert "257" in str(request.error)


def test_an_unknown_kind_of_log_probs_is_refused_by_name(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigurationError, match=r"logprobs_mode=.cooked.*raw_logprobs") as refusal:
        make_engine(logprobs_mode="cooked")
    assert isinstance(refusal.value, ValueError)


def expected_log_probs(naive_logits: NaiveLogits, request: DynamicInferenceRequest, mode: str) -> list[float]:
    """Log probabilities of every token but the first, by one full forward pass."""
    params = request.sampling_params
    assert params is not None
    tokens = PROMPT + request.generated_tokens
    logits = naive_logits(tokens)
    values = []
    for place in range(1, len(tokens)):
        row = logits[place - 1]
        if mode == "processed_logprobs" and place >= len(PROMPT):
            row = edited(row, params, PROMPT, tokens[len(PROMPT) : place]) / params.temperature
            row = torch.where(row >= row.topk(params.top_k).values[-1], row, -torch.inf)
        values.append(row.log_softmax(-1)[tokens[place]].item())
    return values


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize(("top_n", "skip"), [(0, False), (0, True), (3, False), (3, True)])
@pytest.mark.parametrize("way", ["at once", "in pieces", "evicted", "elsewhere"])
def test_log_probs_have_the_same_shape_and_values_in_any_schedule(
    make_engine: MakeEngine, naive_logits: NaiveLogits, mode: str, top_n: int, skip: bool, way: str
) -> None:
    params = SamplingParams(
        seed=1,
        temperature=1.5,
        top_k=20,
        num_tokens_to_generate=LENGTH,
        ignore_eos=True,
        return_log_probs=True,
        top_n_logprobs=top_n,
        skip_prompt_log_probs=skip,
        repetition_penalty=1.4,
        frequency_penalty=0.8,
    )
    requests = [serve(make_engine(logprobs_mode=mode), params)]
    if way == "in pieces":
        requests = [serve(make_engine(logprobs_mode=mode, max_tokens=2, max_requests=1), params)]
    elif way == "evicted":
        requests = serve_under_pressure(make_engine, [params] * 4, logprobs_mode=mode)
    elif way == "elsewhere":
        engine = make_engine(logprobs_mode=mode, max_tokens=4, max_requests=2)
        future = engine.add_request(0, PROMPT, params, generated=requests[0].generated_tokens[:7])
        while engine.has_unfinished_requests():
            engine.step_modern()
        requests = [future.result(timeout=0).merge()]
    for request in requests:
        expected = expected_log_probs(naive_logits, request, mode)
        assert_log_probs(request, params, len(PROMPT), expected)


def test_excluded_tokens_are_not_in_the_top_n(make_engine: MakeEngine) -> None:
    five = {"num_tokens_to_generate": 5, "ignore_eos": True}
    params = SamplingParams(top_k=2, **five, return_log_probs=True, top_n_logprobs=4)
    processed = serve(make_engine(logprobs_mode="processed_logprobs"), params)
    assert [len(top) for top in processed.generated_top_n_logprobs or []] == [2] * 5
    assert [len(top) for top in serve(make_engine(), params).generated_top_n_logprobs or []] == [4] * 5


def test_samples_of_a_prompt_are_returned_together_and_reproducible_alone(make_engine: MakeEngine) -> None:
    params = SamplingParams(seed=2**64 - 1, n=3, num_tokens_to_generate=8)
    records = make_engine().generate([PROMPT, [1, 2]], params)
    answers = [record.merge().generated_tokens for record in records]
    assert len({tuple(answer) for answer in answers}) == 6
    for index, seed in enumerate([2**64 - 1, 0, 1]):
        assert (
            serve(make_engine(), SamplingParams(seed=seed, num_tokens_to_generate=8)).generated_tokens
            == (answers[index])
        )
    unseeded = make_engine().generate([PROMPT], SamplingParams(n=3, num_tokens_to_generate=8, ignore_eos=True))
    assert len({tuple(record.merge().generated_tokens) for record in unseeded}) == 3


def test_a_single_request_has_a_single_answer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    record = engine.add_request(0, PROMPT, SamplingParams(n=2)).result(timeout=0)
    assert isinstance(record[-1].error, InvalidRequestError)
    assert (record[-1].error.field, record[-1].finish_reason) == ("n", "error")
