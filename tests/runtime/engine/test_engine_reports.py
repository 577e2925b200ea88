"""Times, events and futures of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import DynamicInferenceEventType, DynamicInferenceRequest
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = [72, 101, 108, 108, 111]


def serve(engine: DynamicInferenceEngine, params: SamplingParams, prompt: object = PROMPT) -> DynamicInferenceRequest:
    return engine.generate([prompt], params)[0].merge()


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def test_times_are_reported(make_engine: MakeEngine) -> None:
    record = make_engine().generate([PROMPT], greedy(num_tokens_to_generate=5))[0]
    request = record.merge()
    assert request.ttft is not None
    assert request.latency is not None
    assert request.tpot is not None
    assert 0 < request.ttft < request.latency
    assert request.ttft + 4 * request.tpot[0] == pytest.approx(request.latency, rel=0.01)


def test_every_logged_step_adds_its_time_per_token(make_engine: MakeEngine) -> None:
    engine = make_engine(logging_step_interval=2)
    future = engine.add_request(0, PROMPT, greedy(num_tokens_to_generate=7))
    times = []
    while engine.has_unfinished_requests():
        times.append(engine.step_modern()["step_time"])
    assert len(times) == 7
    assert future.result(timeout=0).merge().tpot == times[1::2]


def test_token_events_are_recorded_if_configured(make_engine: MakeEngine) -> None:
    request = serve(make_engine(track_generated_token_events=True), greedy(num_tokens_to_generate=3))
    events = [event for event in request.events if event.type is DynamicInferenceEventType.GENERATED_TOKEN]
    assert [event.payload["token_id"] for event in events] == request.generated_tokens


async def test_in_an_event_loop_the_future_is_awaitable(make_engine: MakeEngine) -> None:
    engine = make_engine()
    future = engine.add_request(0, PROMPT, greedy(num_tokens_to_generate=3))
    assert isinstance(future, asyncio.Future)
    while engine.has_unfinished_requests():
        await engine.async_step()
    assert (await future)[-1].succeeded()


async def test_a_future_is_resolved_from_another_thread(make_engine: MakeEngine) -> None:
    engine = make_engine()
    future = engine.add_request(0, PROMPT, greedy(num_tokens_to_generate=1))
    await asyncio.to_thread(engine.step_modern)
    async with asyncio.timeout(10):
        assert (await future)[-1].succeeded()
