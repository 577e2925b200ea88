"""Requests through the coordinator: each one is answered once and correctly."""

from __future__ import annotations

import asyncio

import pytest
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until

from megatron_runtime.errors import EngineError, RequestTimeoutError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams


def params(tokens: int = 12) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=tokens, seed=5)


async def stream_tokens(client: InferenceClient, prompt: str, wanted: SamplingParams) -> list[int]:
    tokens: list[int] = []
    async for update in client.stream_request(prompt, wanted):
        tokens += update.new_tokens
        if update.finished is not None:
            assert update.finished.generated_tokens == tokens
    return tokens


async def test_a_request_returns_the_tokens_of_the_engine(fleet: Fleet) -> None:
    fleet.add_engine()
    client = await fleet.connect()
    result = await client.add_request("hello", params())
    assert result[-1].generated_tokens == expected_tokens("hello", params())
    assert result.merge().finish_reason == "length"
    assert result.generated_tokens == result[-1].generated_tokens
    assert result.latency > 0
    assert client.completion_futures == {}


async def test_a_client_without_deserialization_gets_serialized_results(fleet: Fleet) -> None:
    fleet.add_engine()
    client = await fleet.connect(deserialize=False)
    result = await client.add_request([1, 2, 3], params())
    assert result["generated_tokens"] == expected_tokens([1, 2, 3], params())


async def test_concurrent_requests_are_distributed_round_robin(fleet: Fleet) -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    for group, engine in enumerate(engines):
        fleet.add_engine(engine, group=group)
    client = await fleet.connect()
    await fleet.ready(client, 3)
    prompts = [f"prompt {number}" for number in range(60)]
    results = await asyncio.gather(*(client.add_request(prompt, params()) for prompt in prompts))
    assert [result.generated_tokens for result in results] == [expected_tokens(prompt, params()) for prompt in prompts]
    assert [len(engine.added) for engine in engines] == [20, 20, 20]


async def test_a_stream_has_every_token_once_and_ends_with_the_request(fleet: Fleet) -> None:
    fleet.add_engine()
    client = await fleet.connect()
    assert await stream_tokens(client, "hello", params(50)) == expected_tokens("hello", params(50))


async def test_a_request_waits_for_the_first_engine(fleet: Fleet) -> None:
    client = await fleet.connect()
    future = client.add_request("early", params())
    await until(lambda: fleet.coordinator and fleet.coordinator.next_request_id == 1, "the submission")
    fleet.add_engine()
    assert (await future).generated_tokens == expected_tokens("early", params())


async def test_a_request_without_any_engine_fails_with_the_reason_at_its_deadline() -> None:
    async with Fleet(request_timeout=0.2) as fleet:
        fleet.start_coordinator()
        client = await fleet.connect()
        with pytest.raises(RequestTimeoutError, match=r"no engine was available .* 0\.2 s"):
            await client.add_request("nobody", params())


async def test_a_request_past_its_timeout_fails_and_is_aborted_in_the_engine(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.01)
    fleet.add_engine(engine)
    client = await fleet.connect()
    with pytest.raises(RequestTimeoutError, match=r"not done within 0\.3 s"):
        await client.add_request("slow", params(100_000), timeout=0.3)
    await until(lambda: not engine.has_unfinished_requests(), "the abort")


async def test_an_aborted_request_returns_its_tokens_so_far(fleet: Fleet) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.005))
    client = await fleet.connect()
    stream = client.stream_request("endless", params(100_000))
    first = await anext(stream)
    client.abort_request(stream.request_id)
    async for update in stream:
        first = update
    assert first.finished is not None
    assert first.finished.finish_reason == "abort"
    assert first.finished.failed()


async def test_closing_a_stream_or_cancelling_a_future_aborts_the_request(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.005)
    fleet.add_engine(engine)
    client = await fleet.connect()
    stream = client.stream_request("endless", params(100_000))
    future = client.add_request("endless too", params(100_000))
    await anext(stream)
    await until(lambda: len(engine.added) == 2, "the hand-out")
    assert engine.has_unfinished_requests()
    await stream.aclose()
    future.cancel()
    await until(lambda: not engine.has_unfinished_requests(), "the abort")
    assert [update async for update in stream] == []
    assert future.cancelled()


async def test_the_requests_of_a_lost_client_are_aborted_in_the_engine(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.005)
    fleet.add_engine(engine)
    client = await fleet.connect()
    other = await fleet.connect()
    doomed = client.add_request("endless", params(100_000))
    await until(engine.has_unfinished_requests, "the start")
    client._dealer.close()  # without a message, as a killed process
    await until(lambda: not engine.has_unfinished_requests(), "the abort")
    doomed.cancel()
    assert (await other.add_request("still there", params())).succeeded()


async def test_a_request_that_the_engine_can_not_decode_fails_and_affects_no_other(fleet: Fleet) -> None:
    fleet.add_engine()
    client = await fleet.connect()
    wrong = params()
    wrong.temperature = "hot"  # type: ignore[assignment]
    result = await client.add_request("hello", wrong)
    assert result.failed()
    assert "temperature" in str(result.error)
    assert (await client.add_request("hello", params())).succeeded()


async def test_a_submission_with_a_known_uuid_is_served_once(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.005)
    fleet.add_engine(engine)
    first, second = await fleet.connect(), await fleet.connect()
    name = b"0123456789abcdef"
    lost = first.add_request("hello", params(40), request_uuid=name)
    await until(engine.has_unfinished_requests, "the start")
    result = await second.add_request("hello", params(40), request_uuid=name)
    assert result.generated_tokens == expected_tokens("hello", params(40))
    assert len(engine.added) == 1
    lost.cancel()


async def test_the_requests_of_a_failing_engine_loop_go_to_another(fleet: Fleet) -> None:
    broken = fleet.add_engine(FakeEngine(step_seconds=0.005, fail_at_step=10), group=0)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    future = client.stream_request("hello", params(30))
    await anext(future)
    engine = FakeEngine()
    fleet.add_engine(engine, group=1)
    tokens = [token async for update in future for token in update.new_tokens]
    assert tokens == expected_tokens("hello", params(30))[1:]
    assert engine.added[0] > 0
    assert broken.ended
    assert isinstance(broken.failure, ArithmeticError)


async def test_a_request_that_breaks_every_engine_fails_after_some_attempts(fleet: Fleet) -> None:
    client = await fleet.connect()
    future = client.add_request("poison", params(30))
    for attempt in range(3):
        loop = fleet.add_engine(FakeEngine(fail_at_step=1), attempt=attempt)
        await until(lambda loop=loop: loop.ended, "the failure")
    with pytest.raises(EngineError, match="the fake engine broke"):
        await future
