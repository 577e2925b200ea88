"""Members of client and engine that Megatron's RL code, its unit tests and NeMo-RL use, as they use them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import zmq
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until
from runtime_support.processes import children_of

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.worker import attach
from megatron_runtime.errors import CoordinatorError, RequestTimeoutError
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.inference_client.async_stream import AsyncStream
from megatron_runtime.inference_request import unwrap_serialized_tensors
from megatron_runtime.parallel.world import World
from megatron_runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=6, ignore_eos=True)
SECONDS = 20.0


def engine_of(parts: dict[str, Any]) -> DynamicInferenceEngine:
    return DynamicInferenceEngine.build(parts["model"], parts["tokenizer"], parts["inference_config"])


async def listen(engine: DynamicInferenceEngine, fleet: Fleet) -> str:
    return await engine.start_listening_to_data_parallel_coordinator(fleet.port, launch_inference_coordinator=False)


# Streams


async def test_a_stream_has_partial_dicts_and_one_final_dict(fleet: Fleet, tiny_parts: dict[str, Any]) -> None:
    fleet.add_engine(engine_of(tiny_parts))
    client = await fleet.connect(deserialize=False)
    await fleet.ready(client, 1)
    params = SamplingParams(temperature=0, num_tokens_to_generate=6, ignore_eos=True, return_log_probs=True)
    assert params.streaming is False
    stream = client.add_request_streaming([1, 2, 3], params)
    assert isinstance(stream, AsyncStream)
    assert params.streaming is True
    assert client.streams == {stream.request_id: stream}
    items = [item async for item in stream]
    partials = [item["partial"] for item in items[:-1]]
    final = items[-1]["final"]
    assert {partial["request_id"] for partial in partials} == {stream.request_id}
    assert [token for partial in partials for token in partial["new_tokens"]] == final["generated_tokens"]
    assert [value for partial in partials for value in partial["new_log_probs"]] == final["generated_log_probs"]
    assert (len(final["generated_tokens"]), final["prompt_length"], final["status"]) == (6, 3, "COMPLETED")
    assert client.streams == {}


async def test_the_final_item_is_a_request_for_a_client_that_deserializes(fleet: Fleet) -> None:
    fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    params = SamplingParams(num_tokens_to_generate=3, seed=5)
    items = [item async for item in client.add_request_streaming("a prompt", params)]
    assert items[-1]["final"].generated_tokens == expected_tokens("a prompt", params)


async def test_closing_a_stream_aborts_its_request(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.005)
    fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    stream = client.add_request_streaming("a prompt", SamplingParams(num_tokens_to_generate=10**6, seed=5))
    assert "partial" in await anext(stream)
    await stream.aclose()
    assert [item async for item in stream] == []
    assert client.streams == {}
    await until(lambda: not engine.has_unfinished_requests(), "the abort")


async def test_stopping_the_client_ends_open_streams_without_an_error() -> None:
    client = InferenceClient(5555)
    started = client.start()
    stream = client.add_request_streaming("a prompt", SamplingParams())
    client.stop()
    assert [item async for item in stream] == []
    assert started is not None


async def test_a_stream_without_an_answer_ends_with_the_error_of_its_request(fleet: Fleet) -> None:
    client = await fleet.connect(request_timeout=0.05)
    stream = client.add_request_streaming("no engine is there", SamplingParams())
    with pytest.raises(RequestTimeoutError):
        await anext(stream)


async def test_a_stream_accepts_items_until_it_is_finished() -> None:
    left: list[str] = []
    stream = AsyncStream(7, lambda: left.append("left"))
    await asyncio.to_thread(stream.put, 1)
    assert not stream.finished
    stream.finish(ValueError("late"))
    stream.put(2)
    assert stream.finished
    assert await anext(stream) == 1
    with pytest.raises(ValueError, match="late"):
        await anext(stream)
    assert left == []


async def test_a_generator_that_is_closed_early_cancels_its_request() -> None:
    left: list[str] = []
    stream = AsyncStream(7, lambda: left.append("left"))
    stream.put(1)
    items = stream.generator()
    assert await anext(items) == 1
    await items.aclose()
    assert left == ["left"]


async def test_a_generator_that_ends_with_an_error_cancels_nothing() -> None:
    left: list[str] = []
    stream = AsyncStream(7, lambda: left.append("left"))
    stream.put(ValueError)
    with pytest.raises(ValueError):  # noqa: PT011
        await anext(stream.generator())
    assert left == []


# The client's socket and task


async def test_the_socket_exists_before_the_client_is_started(fleet: Fleet) -> None:
    fleet.add_engine()
    client = InferenceClient(fleet.address)
    assert client.socket is not None
    client.socket.setsockopt(zmq.LINGER, 10)
    await client.start()
    assert client.socket.getsockopt(zmq.LINGER) == 10
    assert client.listener_task is not None
    assert client.listener_task.get_coro().__name__ == InferenceClient._recv_task.__name__
    assert (await client.add_request("a prompt", SamplingParams(num_tokens_to_generate=1, seed=5))).succeeded()
    client.stop()
    assert client.socket is None


def test_a_client_that_was_never_started_closes_its_socket() -> None:
    client = InferenceClient(5555)
    socket, context = client.socket, client.context
    assert socket is not None
    assert context is not None
    client.stop()
    assert socket.closed
    assert context.closed


# Staleness


async def test_the_client_counts_weight_updates_in_unfinished_requests(
    fleet: Fleet, tiny_parts: dict[str, Any]
) -> None:
    engine = engine_of(tiny_parts)
    fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.pause_engines()
    request = client.add_request([1, 2, 3], GREEDY)
    await until(engine.has_unfinished_requests, "the request")
    await client.increment_staleness()
    await client.increment_staleness()
    await client.unpause_engines()
    finished = await request
    assert finished.policy_staleness.tolist() == [2, 2, 2] + [0] * 6
    assert finished.kv_cache_staleness is None  # counters of 0: nothing was computed with other weights


async def test_every_engine_counts_weight_updates(fleet: Fleet) -> None:
    engines = [FakeEngine(), FakeEngine()]
    for group, engine in enumerate(engines):
        fleet.add_engine(engine, group=group)
    client = await fleet.connect()
    await fleet.ready(client, 2)
    await client.increment_staleness()
    await until(lambda: [engine.staleness for engine in engines] == [1, 1], "the count")


async def test_every_engine_drops_its_cached_prefixes(fleet: Fleet) -> None:
    engines = [FakeEngine(), FakeEngine()]
    for group, engine in enumerate(engines):
        fleet.add_engine(engine, group=group)
    client = await fleet.connect()
    await fleet.ready(client, 2)
    await client.reset_prefix_cache()
    await until(lambda: [engine.prefix_resets for engine in engines] == [1, 1], "the reset")


# The engine


async def test_a_trainer_reads_the_events_of_the_engine_and_awaits_its_loop(
    fleet: Fleet, tiny_parts: dict[str, Any]
) -> None:
    engine = engine_of(tiny_parts)
    assert engine.engine_loop_task is None
    assert engine.capture_stats is None
    address = await listen(engine, fleet)
    client = InferenceClient(inference_coordinator_address=address)
    client.start()
    async with asyncio.timeout(SECONDS):
        assert engine._state_events[EngineState.RUNNING].is_set()
        await engine.running.wait()
        client.pause_engines()
        await engine.paused.wait()
        client.suspend_engines()
        await engine.wait_until(EngineState.SUSPENDED)
        assert not engine._state_events[EngineState.RUNNING].is_set()
        assert not engine._state_events[EngineState.RESUMED].is_set()
        client.resume_engines()
        await engine.wait_until(EngineState.RESUMED)
        assert not engine._state_events[EngineState.SUSPENDED].is_set()
        client.unpause_engines()
        await engine._state_events[EngineState.RUNNING].wait()
        assert not engine.paused.is_set()
        client.pause_engines()
        await engine.paused.wait()
        client.stop_engines()
        await engine.stopped.wait()
        assert engine.engine_loop_task is not None
        await engine.engine_loop_task
    client.stop()


async def test_the_length_of_a_prompt_is_in_results_that_leave_the_prompt_out(
    fleet: Fleet, tiny_parts: dict[str, Any]
) -> None:
    fleet.add_engine(engine_of(tiny_parts))
    client = await fleet.connect(deserialize=False)
    await fleet.ready(client, 1)
    params = SamplingParams(temperature=0, num_tokens_to_generate=2, ignore_eos=True)
    result = unwrap_serialized_tensors(await client.add_request([1, 2, 3, 4], params))
    assert (result["prompt_length"], result["prompt_tokens"]) == (4, None)
    params.return_prompt_tokens = True
    result = unwrap_serialized_tensors(await client.add_request([1, 2, 3, 4], params))
    assert (result["prompt_length"], result["prompt_tokens"]) == (4, [1, 2, 3, 4])


async def test_engines_that_do_not_register_in_time_end_the_start_with_an_error(
    tiny_parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with the coordinator, whose process is the only one that this test starts."""
    monkeypatch.setattr(attach, "READY_SECONDS", 0.0)
    monkeypatch.setattr(World, "replica_groups", 2)
    before = children_of(os.getpid()).keys()
    with pytest.raises(CoordinatorError, match=r"[01] of 2 engines are ready after 0 s"):
        await engine_of(tiny_parts).start_listening_to_data_parallel_coordinator()
    left = [line for pid, line in children_of(os.getpid()).items() if pid not in before and "coordinator" in line]
    assert left == []
