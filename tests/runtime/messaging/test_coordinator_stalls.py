"""Large requests, stalled processes and defects of one request delay or lose no other request."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from messaging_support.fake_engine import FakeEngine, StuckEngine, expected_tokens
from messaging_support.fleet import Fleet, until
from messaging_support.unknown_peer import unknown_peer
from suite_support.repetition import repeated

from megatron_runtime.data_parallel_inference_coordinator.dispatcher import PUSH_BYTES
from megatron_runtime.engine.worker.withheld_bodies import WINDOW_BYTES, WithheldBodies
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.headers import Headers
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec
from megatron_runtime.wire.batches import BATCH_BYTES, in_batches
from megatron_runtime.wire.codec import MAX_BATCH

PARAMS = SamplingParams(num_tokens_to_generate=20, seed=5)
SHORT = SamplingParams(num_tokens_to_generate=60, seed=5)
LONG = SamplingParams(num_tokens_to_generate=300, seed=5)
ENDLESS = SamplingParams(num_tokens_to_generate=repeated(3_000, 10_000), seed=5)


@dataclass
class SlowAdmission(FakeEngine):
    """Admits a request as slowly as a real engine that tokenizes a large prompt."""

    admission_seconds: float = 0.0

    def add_request(
        self, request_id: int, prompt: Any, sampling_params: SamplingParams | None, *, generated: Sequence[int] = ()
    ) -> None:
        time.sleep(self.admission_seconds)
        super().add_request(request_id, prompt, sampling_params, generated=generated)


@dataclass
class HeldFirstStep(SlowAdmission, StuckEngine):
    """``admitted`` has the number of requests that each step begins with once the event is set."""

    admitted: list[int] = field(default_factory=list)

    def step_modern(self) -> dict[str, Any]:
        if self.let_go.is_set():
            self.admitted.append(len(self.added))
        return super().step_modern()


def prompts(count: int, size: int) -> list[str]:
    return [f"{number:>{size}}" for number in range(count)]


async def answers(client: InferenceClient, wanted: list[str], params: SamplingParams) -> list[list[int]]:
    results = await asyncio.gather(*(client.add_request(prompt, params) for prompt in wanted))
    return [list(result.generated_tokens) for result in results]


async def test_heartbeats_do_not_wait_for_the_admission_of_many_requests() -> None:
    engine = SlowAdmission(admission_seconds=0.03)
    async with Fleet(engine_timeout=60.0) as fleet:
        coordinator = fleet.start_coordinator()
        fleet.add_engine(engine)
        client = await fleet.connect()
        await fleet.ready(client, 1)
        wanted = prompts(100, 20_000)
        results = asyncio.create_task(answers(client, wanted, PARAMS))
        await until(lambda: engine.added, "the first admission")
        (peer,) = coordinator._core.engines
        last_seen = peer.last_seen
        await until(lambda: peer.last_seen > last_seen, "a heartbeat")
        assert len(engine.added) < len(wanted)
        assert await results == [expected_tokens(prompt, PARAMS) for prompt in wanted]
        assert (await client.service_state()).dropped_messages == 0
    assert engine.added == [0] * 100


async def test_running_requests_get_steps_while_others_are_admitted(fleet: Fleet) -> None:
    fleet.add_engine(SlowAdmission(admission_seconds=0.05))
    client = await fleet.connect()
    await fleet.ready(client, 1)
    stream = client.stream_request("first", LONG)
    await anext(stream)
    others = [client.add_request(prompt, PARAMS) for prompt in prompts(60, BATCH_BYTES // 2)]
    for _ in range(5):
        await anext(stream)
    assert not all(future.done() for future in others)
    await stream.aclose()
    await asyncio.gather(*others)


async def test_a_step_does_not_wait_until_many_small_requests_are_admitted(fleet: Fleet) -> None:
    engine = HeldFirstStep(admission_seconds=0.005)
    loop = fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    first = client.add_request("first", PARAMS)
    await until(engine.has_unfinished_requests, "the first step")
    others = [client.add_request(prompt, PARAMS) for prompt in prompts(200, 10)]
    await until(lambda: len(loop._inbox._queue) == len(others), "the arrival of the others")
    engine.let_go.set()
    await asyncio.gather(first, *others)
    assert engine.admitted[0] < 1 + len(others)


STALL_SECONDS = repeated(3.5, 60.0)
STALLED_REQUESTS = repeated(100, 1000)
RECOVERY_SECONDS = 10.0


async def _seconds_to_answer(stalled: str | None) -> float:
    """From the admission of many large requests, and a stall of this process if any, to the answer of a later one."""
    async with Fleet() as fleet:
        coordinator = await fleet.spawn_coordinator()
        engine = fleet.spawn_engine(group=0, step_seconds=0.02)
        client = await fleet.connect(coordinator_timeout=2 * STALL_SECONDS + 60)
        await fleet.ready(client, 1)
        wanted = prompts(STALLED_REQUESTS, 100_000)
        results = asyncio.create_task(answers(client, wanted, ENDLESS))
        load = 0
        while load < len(wanted):
            load = sum(view.running for view in (await client.service_state()).engines)
        if stalled is not None:
            pid = {"coordinator": coordinator.pid, "engine": engine.pid}[stalled]
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STALL_SECONDS)
            os.kill(pid, signal.SIGCONT)
        begin = time.monotonic()
        stream = client.stream_request("later", PARAMS)
        assert [token async for update in stream for token in update.new_tokens] == expected_tokens("later", PARAMS)
        await fleet.ready(client, 1)
        seconds = time.monotonic() - begin
        state = await client.service_state()
        assert state.outstanding_requests == len(wanted)
        results.cancel()
        await asyncio.gather(results, return_exceptions=True)
    return seconds


@pytest.mark.repetition
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["coordinator", "engine"])
async def test_a_service_with_many_large_requests_answers_soon_after_a_stall(victim: str) -> None:
    """The engine still admits the large requests then: without a stall, this takes as long as the machine is slow."""
    assert await _seconds_to_answer(victim) < RECOVERY_SECONDS + 2 * await _seconds_to_answer(None)


async def test_a_coordinator_that_was_stopped_keeps_its_engines() -> None:
    engine = FakeEngine(step_seconds=0.02)
    async with Fleet(engine_timeout=3.0) as fleet:
        coordinator = await fleet.spawn_coordinator()
        assert coordinator.pid is not None
        fleet.add_engine(engine)
        client = await fleet.connect()
        await fleet.ready(client, 1)
        wanted = prompts(20, 10)
        results = asyncio.create_task(answers(client, wanted, LONG))
        await until(lambda: len(engine.added) == len(wanted), "the assignment")
        os.kill(coordinator.pid, signal.SIGSTOP)
        await asyncio.sleep(5)
        os.kill(coordinator.pid, signal.SIGCONT)
        assert await results == [expected_tokens(prompt, LONG) for prompt in wanted]
        assert (await client.service_state()).dropped_messages == 0
    assert engine.added == [0] * len(wanted)


async def test_large_requests_of_a_lost_engine_reach_another_one_as_it_asks_for_them(fleet: Fleet) -> None:
    doomed = fleet.spawn_engine(group=0, step_seconds=0.02)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    wanted = prompts(40, PUSH_BYTES // 10)
    results = asyncio.create_task(answers(client, wanted, LONG))
    coordinator = fleet.coordinator
    assert coordinator is not None
    await until(lambda: len(coordinator.request_id_to_client_id) == len(wanted), "the submission")
    engine = FakeEngine()
    fleet.add_engine(engine, group=1)
    await fleet.ready(client, 2)
    doomed.kill()
    assert await results == [expected_tokens(prompt, LONG) for prompt in wanted]
    assert len(engine.added) == len(wanted)
    await until(lambda: not coordinator.request_id_to_client_id, "the end of all requests")


async def test_bodies_are_not_sent_again_to_an_engine_that_has_them(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.01)
    loop = fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    wanted = prompts(30, 100_000)
    results = asyncio.create_task(answers(client, wanted, LONG))
    await until(lambda: len(engine.added) == len(wanted), "the assignment")
    received: list[int] = []
    handle = loop._connection._on_message

    def count(message: codec.Message) -> None:
        received.append(sum(map(len, message.bodies)))
        handle(message)

    loop._connection._on_message = count
    loop._connection._register()
    assert await results == [expected_tokens(prompt, LONG) for prompt in wanted]
    assert engine.added == [0] * len(wanted)
    assert sum(received) == 0


async def test_an_aborted_request_whose_body_the_engine_lacks_ends(fleet: Fleet) -> None:
    doomed = fleet.spawn_engine(group=0, step_seconds=0.02)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    futures = [client.add_request(prompt, LONG) for prompt in prompts(40, WINDOW_BYTES // 20)]
    coordinator = fleet.coordinator
    assert coordinator is not None
    await until(lambda: len(coordinator.request_id_to_client_id) == len(futures), "the submission")
    fleet.add_engine(SlowAdmission(admission_seconds=0.05), group=1)
    await fleet.ready(client, 2)
    doomed.kill()
    await until(lambda: len(coordinator.identities_of_data_parallel_ranks) == 1, "the loss of the engine")
    for future in futures:
        client.abort_request(future.request_id)
    async with asyncio.timeout(30):
        await asyncio.gather(*futures, return_exceptions=True)
    await until(lambda: not coordinator.request_id_to_client_id, "the end of all requests")


async def test_a_request_that_grew_too_large_to_be_submitted_again_fails_alone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.005))
    client = await fleet.connect()
    await fleet.ready(client, 1)
    stream = client.stream_request("x" * 2100, SamplingParams(num_tokens_to_generate=100_000, seed=5))
    other = client.add_request("small", SHORT)
    received = 0
    while received < 200:
        received += len((await anext(stream)).new_tokens)
    # With a real limit of 64 MiB this takes millions of tokens.
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 2200)
    await asyncio.to_thread(fleet.stop_coordinator)
    fleet.start_coordinator()
    with pytest.raises(InvalidRequestError, match="can't be sent again"):
        async for _ in stream:
            pass
    assert (await other).generated_tokens == expected_tokens("small", SHORT)


async def test_a_result_that_is_too_large_fails_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.002))
    client = await fleet.connect()
    await fleet.ready(client, 1)
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 2500)
    large, small = client.add_request("large", LONG), client.add_request("small", SHORT)
    failed = await large
    assert not failed.succeeded()
    assert "the result can't be sent: the message has" in str(failed.error)
    assert (await small).generated_tokens == expected_tokens("small", SHORT)


async def test_many_block_hashes_are_spread_over_messages() -> None:
    async with Fleet(enable_prefix_caching=True, block_size_tokens=1) as fleet:
        fleet.start_coordinator()
        fleet.add_engine(FakeEngine())
        client = await fleet.connect()
        await fleet.ready(client, 1)
        # Their hashes together are larger than the header of a message may be.
        results = await asyncio.gather(*(client.add_request([7] * 20_000, PARAMS) for _ in range(30)))
        assert all(result.succeeded() for result in results)


async def test_an_error_of_on_update_fails_its_request_alone(fleet: Fleet) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.002))
    client = await fleet.connect()
    await fleet.ready(client, 1)

    def fail(_: object) -> None:
        raise ArithmeticError("of the caller")

    failing = [client.add_request("failing", LONG, on_update=fail) for _ in range(3)]
    others = [client.stream_request(f"other {number}", LONG) for number in range(5)]
    for future in failing:
        with pytest.raises(ArithmeticError, match="of the caller"):
            await future
    for number, stream in enumerate(others):
        tokens = [token async for update in stream for token in update.new_tokens]
        assert tokens == expected_tokens(f"other {number}", LONG)


async def test_an_unknown_peer_is_not_answered_once_per_message(fleet: Fleet) -> None:
    client = await fleet.connect()
    with unknown_peer(fleet.address) as unknown:
        for _ in range(500):
            unknown.send_multipart(codec.encode(Headers.SHUTDOWN))
        dropped = 0
        while dropped < 500:
            dropped = (await client.service_state()).dropped_messages
        count = 0
        while await asyncio.to_thread(unknown.poll, 200):
            unknown.recv_multipart()
            count += 1
    assert 1 <= count <= 20


def test_batches_are_limited_by_items_bytes_and_numbers() -> None:
    def sizes(pairs: list[tuple[tuple[Any, ...], bytes]]) -> list[int]:
        return [len(batch) for batch, bodies in in_batches(pairs) if len(batch) == len(bodies)]

    assert sizes([]) == []
    assert sizes([((), b"")] * (2 * MAX_BATCH + 1)) == [MAX_BATCH, MAX_BATCH, 1]
    assert sizes([((), bytes(BATCH_BYTES // 2))] * 5) == [2, 2, 1]
    assert sizes([((), bytes(3 * BATCH_BYTES))] * 2) == [1, 1]
    assert sizes([(([1] * BATCH_BYTES,), b"")] * 2) == [1, 1]


def test_bodies_are_asked_for_within_the_window_in_their_order() -> None:
    asked: list[list[bytes]] = []
    withheld = WithheldBodies(asked.append)
    for name in (b"a", b"b", b"c", b"d"):
        withheld.add(name, WINDOW_BYTES // 2)
    withheld.add(b"a", 1)
    withheld.ask()
    withheld.ask()
    withheld.ask_now(b"a")
    assert asked == [[b"a", b"b"]]
    withheld.remove(b"a")
    withheld.ask()
    assert asked == [[b"a", b"b"], [b"c"]]
    withheld.ask_now(b"d")
    assert asked[-1] == [b"d"]
    for name in (b"b", b"c", b"d", b"unknown"):
        withheld.remove(name)
    withheld.add(b"e", 1)
    withheld.clear()
    withheld.ask()
    withheld.add(b"e", 1)
    withheld.ask()
    assert asked[-2:] == [[b"d"], [b"e"]]
