"""The end of requests, their reports, and rejected requests."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

import pytest
import torch

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import (
    BlockOverflowError,
    InvalidLogitsError,
    InvalidRequestError,
    MaxSequenceLengthOverflowError,
    RequestTimeoutError,
    TokenOverflowError,
)
from megatron_runtime.inference_request import DynamicInferenceEventType, DynamicInferenceRequest, Status
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
NaiveGreedy = Callable[[list[int], int], list[int]]
PROMPT = [72, 101, 108, 108, 111]


def serve(engine: DynamicInferenceEngine, params: SamplingParams, prompt: object = PROMPT) -> DynamicInferenceRequest:
    return engine.generate([prompt], params)[0].merge()


def streamed(engine: DynamicInferenceEngine, params: SamplingParams) -> tuple[list[list[int]], DynamicInferenceRequest]:
    params.streaming = True
    engine.add_request(0, PROMPT, params)
    pieces: list[list[int]] = []
    while True:
        result = engine.step_modern()
        if partial := result["partial_outputs"].get(0):
            pieces.append(partial.new_tokens)
        if result["finished_request_records"]:
            return pieces, result["finished_request_records"][0].merge()


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def as_text(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def test_text_and_tokens_and_tensors_are_the_same_prompt(make_engine: MakeEngine) -> None:
    params = greedy(num_tokens_to_generate=6)
    answers = [serve(make_engine(), params, p).generated_tokens for p in ("Hello", PROMPT, torch.tensor(PROMPT))]
    assert answers[0] == answers[1] == answers[2]


def test_a_length_limit_ends_a_request_exactly(make_engine: MakeEngine) -> None:
    request = serve(make_engine(), greedy(num_tokens_to_generate=9))
    assert (len(request.generated_tokens), request.finish_reason, request.status) == (9, "length", Status.COMPLETED)
    assert request.generated_text == as_text(request.generated_tokens)
    assert serve(make_engine(), greedy(num_tokens_total=9)).generated_length == 4
    assert serve(make_engine(max_sequence_length=11), greedy()).generated_length == 6
    assert serve(make_engine(), greedy(num_tokens_to_generate=0)).generated_tokens == []


def test_without_a_limit_an_answer_fills_the_pool(make_engine: MakeEngine) -> None:
    request = serve(make_engine(3), greedy())
    assert (request.generated_length, request.finish_reason) == (12 + 1 - 5, "length")


def test_a_stop_token_ends_the_answer_and_is_not_in_the_text(
    make_engine: MakeEngine, naive_greedy: NaiveGreedy
) -> None:
    expected = naive_greedy(PROMPT, 20)
    stop = next(token for i, token in enumerate(expected) if i > 3 and token not in expected[:i])
    length = expected.index(stop)
    for params in (
        greedy(termination_id=stop),
        greedy(stop_token_ids=[stop]),
        greedy(stop_token_ids=[stop], ignore_eos=True),
    ):
        request = serve(make_engine(), params)
        assert request.generated_tokens == expected[: length + 1]
        assert request.generated_text == as_text(expected[:length])
        assert request.finish_reason == "stop"
        assert request.stop_reason == (stop if params.stop_token_ids else None)
    kept = serve(make_engine(), greedy(stop_token_ids=[stop], detokenize_stop_sequence=True))
    assert kept.generated_text == as_text(expected[: length + 1])
    ignored = serve(make_engine(), greedy(termination_id=stop, ignore_eos=True, num_tokens_to_generate=20))
    assert ignored.generated_tokens == expected


def test_a_stop_string_across_tokens_ends_the_answer_and_is_never_streamed(
    make_engine: MakeEngine, naive_greedy: NaiveGreedy, ascii_prompt: list[int]
) -> None:
    expected = naive_greedy(ascii_prompt, 40)
    text = as_text(expected)
    start = next(i for i in range(3, 38) if text.find(text[i : i + 3]) == i and text[i : i + 3].isascii())
    stop = text[start : start + 3]
    engine = make_engine()
    params = SamplingParams(temperature=0, num_tokens_to_generate=40, stop=[stop], streaming=True)
    engine.add_request(0, ascii_prompt, params)
    seen: list[int] = []
    finished = None
    while finished is None:
        result = engine.step_modern()
        partial = result["partial_outputs"].get(0)
        seen += partial.new_tokens if partial else []
        assert stop not in as_text(seen)
        finished = next(iter(result["finished_request_records"]), None)
    request = finished.merge()
    assert request.generated_text == text[:start]
    assert seen == request.generated_tokens
    assert as_text(seen) == text[:start]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    kept = engine.generate([ascii_prompt], greedy(stop=[stop], detokenize_stop_sequence=True))[0].merge()
    assert kept.generated_text == text[: start + 3]


@pytest.fixture
def ascii_prompt(naive_greedy: NaiveGreedy) -> list[int]:
    """A prompt whose greedy answer has three consecutive ASCII characters that did not occur before."""
    for first in range(256):
        text = as_text(naive_greedy([first, 1, 2], 40))
        if any(text[i : i + 3].isascii() and text.find(text[i : i + 3]) == i for i in range(3, len(text) - 3)):
            return [first, 1, 2]
    raise AssertionError("no prompt of the tiny model answers in ASCII")


@pytest.mark.parametrize("interval", [1, 4])
def test_streamed_tokens_join_to_the_answer(make_engine: MakeEngine, interval: int) -> None:
    pieces, request = streamed(make_engine(), greedy(num_tokens_to_generate=10, streaming_interval=interval))
    assert [len(piece) for piece in pieces] == ([1] * 10 if interval == 1 else [4, 4, 2])
    assert [token for piece in pieces for token in piece] == request.generated_tokens


def test_the_token_that_ends_the_answer_is_not_streamed(make_engine: MakeEngine, naive_greedy: NaiveGreedy) -> None:
    expected = naive_greedy(PROMPT, 4)
    stop = next(token for i, token in enumerate(expected) if i and token not in expected[:i])
    pieces, request = streamed(make_engine(), greedy(stop_token_ids=[stop]))
    assert [token for piece in pieces for token in piece] == request.generated_tokens[:-1]


def test_requests_that_do_not_stream_report_only_their_end(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(0, PROMPT, greedy(num_tokens_to_generate=3))
    assert not any(engine.step_modern()["partial_outputs"] for _ in range(3))


def test_a_seed_determines_the_answer_in_any_batch(make_engine: MakeEngine) -> None:
    params = SamplingParams(seed=11, temperature=1.3, top_k=40, top_p=0.95, num_tokens_to_generate=16)
    alone = serve(make_engine(), params)
    others = [SamplingParams(num_tokens_to_generate=30) for _ in range(5)]
    crowd = make_engine(24).generate([[i] * 9 for i in range(5)] + [PROMPT], [*others, params])
    assert crowd[-1].merge().generated_tokens == alone.generated_tokens
    other = SamplingParams(seed=12, temperature=1.3, num_tokens_to_generate=16)
    assert serve(make_engine(), other).generated_tokens != alone.generated_tokens


def test_a_random_seed_is_stored_and_reproduces_the_answer(make_engine: MakeEngine) -> None:
    first = serve(make_engine(), SamplingParams(num_tokens_to_generate=12))
    assert first.sampling_params is not None
    assert first.sampling_params.seed is not None
    again = serve(make_engine(), SamplingParams(seed=first.sampling_params.seed, num_tokens_to_generate=12))
    assert again.generated_tokens == first.generated_tokens


@pytest.mark.parametrize("made", [1, 5, 11])
def test_an_answer_that_another_engine_began_continues_equally(make_engine: MakeEngine, made: int) -> None:
    params = SamplingParams(
        seed=5, num_tokens_to_generate=12, return_log_probs=True, skip_prompt_log_probs=True, streaming=True
    )
    whole = serve(make_engine(), params)
    engine = make_engine()
    future = engine.add_request(0, PROMPT, params, generated=whole.generated_tokens[:made])
    seen: list[int] = []
    while engine.has_unfinished_requests():
        for partial in engine.step_modern()["partial_outputs"].values():
            seen += partial.new_tokens
            assert partial.new_log_probs is not None
            assert len(partial.new_log_probs) == len(partial.new_tokens)
    assert isinstance(future, concurrent.futures.Future)
    request = future.result(timeout=0).merge()
    assert request.generated_tokens == whole.generated_tokens
    assert request.generated_log_probs == pytest.approx(whole.generated_log_probs, abs=1e-4)
    assert seen == whole.generated_tokens[made:]


def test_an_answer_that_was_complete_on_another_engine_ends_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(0, PROMPT, greedy(num_tokens_to_generate=3), generated=[1, 2, 3])
    engine.add_request(1, PROMPT, greedy(num_tokens_to_generate=9), generated=[1, 2, 256])
    engine.add_request(2, PROMPT, greedy(num_tokens_to_generate=9, stop=["b"]), generated=[97, 98])
    records = engine.step_modern()["finished_request_records"]
    assert [record[-1].finish_reason for record in records] == ["length", "stop", "stop"]
    assert records[2].merge().generated_text == "a"


@pytest.mark.parametrize("max_tokens", [3, 64])
@pytest.mark.parametrize("skip", [False, True])
def test_log_probs_equal_those_of_a_single_pass(
    make_engine: MakeEngine, naive_logits: Callable[[list[int]], torch.Tensor], max_tokens: int, skip: bool
) -> None:
    params = SamplingParams(
        seed=1, num_tokens_to_generate=6, return_log_probs=True, top_n_logprobs=3, skip_prompt_log_probs=skip
    )
    request = serve(make_engine(max_tokens=max_tokens, max_requests=2), params)
    tokens = PROMPT + request.generated_tokens
    reference = naive_logits(tokens).log_softmax(-1)
    expected = [reference[i - 1, token].item() for i, token in enumerate(tokens) if i > 0]
    assert request.generated_log_probs == pytest.approx(expected[len(PROMPT) - 1 :], abs=1e-4)
    assert request.generated_top_n_logprobs is not None
    assert [len(top) for top in request.generated_top_n_logprobs] == [3] * 6
    best = reference[len(PROMPT) - 1].max().item()
    assert max(request.generated_top_n_logprobs[0].values()) == pytest.approx(best, abs=1e-4)
    if skip:
        assert request.prompt_log_probs is None
        assert request.prompt_top_n_logprobs is None
    else:
        assert request.prompt_log_probs == pytest.approx(expected[: len(PROMPT) - 1], abs=1e-4)
        assert len(request.prompt_top_n_logprobs or []) == len(PROMPT) - 1


def test_a_prompt_can_be_scored_without_an_answer(make_engine: MakeEngine) -> None:
    request = serve(make_engine(max_tokens=2, max_requests=1), greedy(num_tokens_to_generate=0, return_log_probs=True))
    assert len(request.prompt_log_probs or []) == len(PROMPT) - 1
    assert (request.generated_tokens, request.generated_log_probs) == ([], [])
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "settings", "params", "error", "words"),
    [
        ([], {}, {}, InvalidRequestError, "prompt is empty"),
        ("", {}, {}, InvalidRequestError, "prompt is empty"),
        ("\ud800", {}, {}, InvalidRequestError, "prompt can't be tokenized"),
        ([1, 257], {}, {}, InvalidRequestError, r"prompt\[1\]=257 .* 0 to 256"),
        ([1, -1], {}, {}, InvalidRequestError, r"prompt\[1\]=-1"),
        ([1, True], {}, {}, InvalidRequestError, r"prompt\[1\]=True"),
        (5.0, {}, {}, InvalidRequestError, "text or token ids, not float"),
        ([1] * 20, {"max_sequence_length": 20}, {}, MaxSequenceLengthOverflowError, "20 tokens .*=20"),
        ([1] * 9, {}, {"num_tokens_total": 8}, InvalidRequestError, "num_tokens_total=8"),
        ([1] * 9, {"blocks": 3}, {"num_tokens_to_generate": 5}, BlockOverflowError, "9 tokens and 5 .* 12 tokens"),
        (
            [1] * 9,
            {"max_tokens": 8, "enable_chunked_prefill": False},
            {},
            TokenOverflowError,
            "9 tokens, .* max_tokens=8",
        ),
    ],
)
def test_a_request_that_can_not_be_served_fails_with_a_message_and_affects_no_other(
    make_engine: MakeEngine,
    prompt: object,
    settings: dict[str, int],
    params: dict[str, int],
    error: type[Exception],
    words: str,
) -> None:
    engine = make_engine(**settings)
    engine.add_request(1, [3], greedy(num_tokens_to_generate=1))
    future = engine.add_request(2, prompt, greedy(**params))
    assert future.done()
    result = engine.step_modern()
    assert {record.request_id for record in result["finished_request_records"]} == {1, 2}
    refused = next(record for record in result["finished_request_records"] if record.request_id == 2).merge()
    assert refused.failed()
    assert refused.finish_reason == "error"
    assert isinstance(refused.error, error)
    with pytest.raises(error, match=words):
        raise refused.error
    kinds = [event.type for event in refused.events]
    assert kinds[-2:] == [DynamicInferenceEventType.ERROR_NONTRANSIENT, DynamicInferenceEventType.FAIL]


def test_a_string_is_not_accepted_as_a_list_of_prompts(make_engine: MakeEngine) -> None:
    with pytest.raises(TypeError, match="must be a list"):
        make_engine().generate("Hello")


def test_an_id_in_use_is_refused_until_its_request_ends(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(4, PROMPT, greedy(num_tokens_to_generate=1))
    with pytest.raises(InvalidRequestError, match="request_id=4 is in use"):
        engine.add_request(4, PROMPT)
    engine.step_modern()
    engine.add_request(4, PROMPT, greedy(num_tokens_to_generate=1))


def test_an_aborted_request_keeps_its_tokens_and_frees_its_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(max_requests=1)
    running = engine.add_request(0, PROMPT, greedy(num_tokens_to_generate=50))
    waiting = engine.add_request(1, PROMPT, greedy(num_tokens_to_generate=2))
    engine.step_modern()
    engine.step_modern()
    assert engine.get_request(0).status is Status.ACTIVE_AND_GENERATING_TOKENS
    assert engine.get_request(1).status is Status.WAITING_IN_QUEUE
    assert engine.abort_request(0)
    assert not engine.abort_request(0)
    assert engine.stats().kv_blocks_used == 0
    record = running.result(timeout=0)
    assert (record[-1].finish_reason, record[-1].status) == ("abort", Status.FAILED)
    assert len(record.merge().generated_tokens) == 2
    assert [r.request_id for r in engine.step_modern()["finished_request_records"]] == [0]
    engine.step_modern()
    assert waiting.result(timeout=0)[-1].succeeded()
    with pytest.raises(KeyError):
        engine.get_request(0)


def test_a_request_past_its_deadline_fails_with_a_message(make_engine: MakeEngine) -> None:
    engine = make_engine(request_timeout=1e-9)
    future = engine.add_request(0, PROMPT, greedy())
    engine.step_modern()
    assert isinstance(future.result(timeout=0)[-1].error, RequestTimeoutError)
    assert not engine.has_unfinished_requests()


def test_all_futures_of_a_failed_engine_resolve(make_engine: MakeEngine) -> None:
    engine = make_engine(max_requests=1)
    futures = [engine.add_request(i, PROMPT, greedy()) for i in range(3)]
    engine.step_modern()
    engine.fail_all_requests(RuntimeError("the device is gone"))
    assert [str(future.result(timeout=0)[-1].error) for future in futures] == ["the device is gone"] * 3
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def test_nan_logits_fail_the_request_and_not_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    model = engine.controller.model
    assert model.head is not None
    good = model.head.table.data.clone()
    try:
        model.head.table.data[5] = torch.nan
        failed = serve(engine, greedy(num_tokens_to_generate=3))
    finally:
        model.head.table.data.copy_(good)
    assert isinstance(failed.error, InvalidLogitsError)
    assert serve(engine, greedy(num_tokens_to_generate=3)).succeeded()
