"""Recovery: no request is lost or answered twice, and no stream has a gap or a repetition."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.false_coordinator import FalseCoordinator
from messaging_support.fleet import Fleet, until
from suite_support.worker import free_port

from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.errors import CoordinatorError, EngineError, RequestTimeoutError
from megatron_runtime.headers import Headers
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec
from megatron_runtime.wire.items import RequestFailure, Submission, items
from megatron_runtime.wire.protocol_version import OWN

LONG = SamplingParams(num_tokens_to_generate=200, seed=5)


async def collect(client: InferenceClient, prompt: str, wanted: SamplingParams) -> list[int]:
    return [token async for update in client.stream_request(prompt, wanted) for token in update.new_tokens]


def start_requests(client: InferenceClient, count: int) -> tuple[list[str], asyncio.Future[list[object]]]:
    """Half of them stream."""
    prompts = [f"request {number}" for number in range(count)]

    async def one(number: int, prompt: str) -> list[int]:
        if number % 2:
            return await collect(client, prompt, LONG)
        result = await client.add_request(prompt, LONG)
        return list(result.generated_tokens)

    return prompts, asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


async def test_requests_of_a_killed_engine_continue_on_the_other_one(fleet: Fleet) -> None:
    doomed = fleet.spawn_engine(group=0, step_seconds=0.01)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    quiet = client.add_request("quiet", LONG)  # first: the other one is assigned after it
    stream = client.stream_request("hello", LONG)
    tokens = list((await anext(stream)).new_tokens)
    engine = FakeEngine()
    fleet.add_engine(engine, group=1)
    await fleet.ready(client, 2)
    # By then the other one, which may begin later, has reported its progress too.
    while len(tokens) < 100:
        tokens += (await anext(stream)).new_tokens
    doomed.kill()
    tokens += [token async for update in stream for token in update.new_tokens]
    assert tokens == expected_tokens("hello", LONG)
    assert (await quiet).generated_tokens == expected_tokens("quiet", LONG)
    assert sorted(engine.added)[1] >= 99
    assert sorted(engine.added)[0] > 0


async def test_a_request_that_grew_too_large_for_another_engine_fails_alone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = fleet.spawn_engine(group=0, step_seconds=0.002)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    large, small = "x" * 1500, "small"
    params = SamplingParams(num_tokens_to_generate=100_000, seed=5)
    stream = client.stream_request(large, params)
    other = client.add_request(small, LONG)
    received = 0
    while received < 600:
        received += len((await anext(stream)).new_tokens)
    # With a real limit of 64 MiB this takes millions of tokens.
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 2500)
    doomed.kill()
    fleet.add_engine(FakeEngine(), group=1)
    with pytest.raises(EngineError, match="too large"):
        async for _ in stream:
            pass
    assert (await other).generated_tokens == expected_tokens(small, LONG)
    assert fleet.coordinator is not None


async def test_a_stalled_engine_is_detected_and_its_late_replies_are_dropped(fleet: Fleet) -> None:
    stalled = fleet.spawn_engine(group=0, step_seconds=0.01)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    stream = client.stream_request("hello", LONG)
    tokens = list((await anext(stream)).new_tokens)
    os.kill(stalled.pid, signal.SIGSTOP)
    fleet.add_engine(FakeEngine(step_seconds=0.005), group=1)
    while len(tokens) < 100:
        tokens += (await anext(stream)).new_tokens
    os.kill(stalled.pid, signal.SIGCONT)
    async for update in stream:
        tokens += update.new_tokens
    assert tokens == expected_tokens("hello", LONG)
    await fleet.ready(client, 2)


async def test_when_all_engines_are_lost_their_requests_fail_with_the_reason_at_the_request_timeout() -> None:
    async with Fleet(request_timeout=1.0) as fleet:
        fleet.start_coordinator()
        doomed = fleet.spawn_engine(group=0, step_seconds=0.01)
        client = await fleet.connect()
        await fleet.ready(client, 1)
        stream = client.stream_request("hello", LONG)
        await anext(stream)
        quiet = client.add_request("quiet", LONG)
        doomed.kill()
        with pytest.raises(RequestTimeoutError, match=r"no engine was available for this request within 1 s"):
            async for _ in stream:
                pass
        with pytest.raises(RequestTimeoutError, match=r"no engine was available for this request within 1 s"):
            await quiet
        assert (await client.service_state()).outstanding_requests == 0
        fleet.add_engine(group=1)
        assert (await client.add_request("later", LONG)).succeeded()


async def test_outstanding_requests_survive_a_killed_coordinator_and_complete_once() -> None:
    async with Fleet() as fleet:
        coordinator = await fleet.spawn_coordinator()
        engines = [FakeEngine(step_seconds=0.01), FakeEngine(step_seconds=0.01)]
        for group, engine in enumerate(engines):
            fleet.add_engine(engine, group=group)
        client = await fleet.connect()
        await fleet.ready(client, 2)
        first_epoch = client.coordinator_epoch
        prompts, answers = start_requests(client, 20)
        await until(lambda: sum(engine.steps for engine in engines) > 20, "some progress")
        await coordinator.close()
        later = client.add_request("sent without a coordinator", LONG)
        await until(lambda: not client.is_connected, "the loss")
        await fleet.spawn_coordinator()
        assert await answers == [expected_tokens(prompt, LONG) for prompt in prompts]
        assert (await later).generated_tokens == expected_tokens("sent without a coordinator", LONG)
        assert client.coordinator_epoch != first_epoch


async def test_results_that_finish_without_a_coordinator_are_delivered_by_the_next_one() -> None:
    async with Fleet() as fleet:
        coordinator = await fleet.spawn_coordinator()
        engine = FakeEngine(step_seconds=0.005)
        loop = fleet.add_engine(engine)
        client = await fleet.connect()
        await fleet.ready(client, 1)
        prompts, answers = start_requests(client, 4)
        await until(lambda: len(engine.added) == 4, "the hand-out")
        await coordinator.close()
        await until(lambda: not engine.has_unfinished_requests(), "the end of the work")
        assert not answers.done()
        await fleet.spawn_coordinator()
        assert await answers == [expected_tokens(prompt, LONG) for prompt in prompts]
        assert len(engine.added) == 4
        await until(lambda: len(loop._requests) == 0, "the acknowledgement")


async def test_the_state_after_a_restart_is_the_initial_state_of_the_coordinator() -> None:
    async with Fleet() as fleet:
        coordinator = await fleet.spawn_coordinator()
        fleet.add_engine()
        client = await fleet.connect()
        await fleet.ready(client, 1)
        await client.pause_engines()
        before = await client.service_state()
        await coordinator.close()
        fleet.state = before.state
        await fleet.spawn_coordinator()
        after = await client.wait_for_state_change(before.revision, 20)
        assert after.state == "PAUSED"
        assert after.revision > before.revision
        await fleet.ready(client, 1)
        assert fleet.loops[0].state.value == "PAUSED"


async def test_without_a_coordinator_all_requests_and_calls_end_with_the_reason() -> None:
    async with Fleet() as fleet:
        fleet.start_coordinator()
        client = await fleet.connect(coordinator_timeout=1.5)
        future = client.add_request("hello", LONG)
        stream = client.stream_request("hello", LONG)
        await asyncio.to_thread(fleet.stop_coordinator)
        with pytest.raises(CoordinatorError, match=f"no answer from a coordinator at {fleet.address}"):
            await future
        with pytest.raises(CoordinatorError):
            await anext(stream)


async def test_a_client_without_a_coordinator_reports_its_address() -> None:
    async with Fleet() as fleet:
        with pytest.raises(CoordinatorError, match="no answer from a coordinator"):
            await fleet.connect(coordinator_timeout=0.5)


async def test_a_newer_attempt_of_a_replica_group_replaces_the_older_which_is_refused(fleet: Fleet) -> None:
    old = fleet.add_engine(FakeEngine(step_seconds=0.005), group=0, attempt=1)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    stream = client.stream_request("hello", LONG)
    tokens = list((await anext(stream)).new_tokens)
    new = fleet.add_engine(FakeEngine(), group=0, attempt=2)
    async for update in stream:
        tokens += update.new_tokens
    assert tokens == expected_tokens("hello", LONG)
    await until(lambda: old.ended, "the end of the old one")
    assert isinstance(old.failure, EngineError)
    late = fleet.add_engine(group=0, attempt=1)
    await until(lambda: late.ended, "the refusal")
    assert "attempt 1 of replica group 0 is outdated" in str(late.failure)
    assert not new.ended


async def test_a_client_that_connects_twice_submits_its_requests_once() -> None:
    """The result may arrive after the first answer and before the second one."""
    port = free_port()
    false = FalseCoordinator(port)
    client = InferenceClient(port)
    welcome = client.start()
    outstanding = client.add_request("hello", LONG)
    try:
        peer, first = await asyncio.to_thread(false.receive, Headers.CONNECT)
        false.send_message(peer, Headers.UNKNOWN_PEER, "epoch")  # as if a message had arrived before the first CONNECT
        _, second = await asyncio.to_thread(false.receive, Headers.CONNECT)
        for hello in (first, second):
            false.send_message(peer, Headers.CONNECT_ACK, OWN, "epoch", 0, *hello.args[1:])
        await welcome
        _, message = await asyncio.to_thread(false.receive, Headers.SUBMIT_REQUEST)
        (submission,) = items(message, Submission.parse)
        false.send_message(peer, Headers.REQUEST_FAILED, [RequestFailure(submission.uuid, "EngineError", "enough")])
        with pytest.raises(EngineError, match="enough"):
            await outstanding
        client.shutdown_coordinator()
        _, next_message = await asyncio.to_thread(false.receive, Headers.SUBMIT_REQUEST, Headers.SHUTDOWN)
        assert next_message.header is Headers.SHUTDOWN
    finally:
        client.stop()
        false.close()


async def test_an_engine_that_many_messages_made_unknown_registers_once() -> None:
    port = free_port()
    false = FalseCoordinator(port)
    working = asyncio.create_task(EngineLoop(FakeEngine(), coordinator_address=port).run())
    try:
        peer, _ = await asyncio.to_thread(false.receive, Headers.REGISTER)
        for _ in range(50):
            false.send_message(peer, Headers.UNKNOWN_PEER, "epoch")
        false.send_message(peer, Headers.REGISTER_ACK, OWN, "epoch")
        _, following = await asyncio.to_thread(false.receive, Headers.REGISTER, Headers.HEARTBEAT)
        assert following.header is Headers.HEARTBEAT
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        false.close()
