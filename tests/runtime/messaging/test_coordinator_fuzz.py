"""Malformed messages, and valid ones of the wrong peer, cause no crash, no growth of memory, and no failed request."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from messaging_support import misplaced
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.false_coordinator import FalseCoordinator
from messaging_support.fleet import Fleet, until
from messaging_support.malformed import SECRET, Frames, answers, everything
from messaging_support.unknown_peer import receive, unknown_peer
from runtime_support.processes import is_alive
from runtime_support.resident_memory import resident_bytes
from suite_support.repetition import repeated
from suite_support.worker import free_port

from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.headers import Headers
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec
from megatron_runtime.wire.items import Assignment, EngineLoad, Finished, Submission, items
from megatron_runtime.wire.protocol_errors import QUIET_SECONDS
from megatron_runtime.wire.protocol_version import OWN

KEY = "k" * 40
MESSAGES = repeated(5_000, 100_000)
AT_ONCE = 25
MOST_GROWTH = 0.1
"""Maximum growth of the coordinator's memory, as a share of it."""
WARM_UP_MESSAGES = 5000
"""Messages after which the coordinator has loaded and allocated what it needs for the others."""
FUZZ = settings(
    phases=[Phase.generate],
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Traffic:
    """Sequential requests until the end of the test, alternately with and without streaming."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self.ending = False
        self.answered = 0

    async def run(self) -> None:
        while not self.ending:
            prompt = f"{SECRET} {self.answered}"
            params = SamplingParams(num_tokens_to_generate=20, seed=self.answered)
            if self.answered % 2:
                tokens = (await self._client.add_request(prompt, params)).generated_tokens
            else:
                updates = self._client.stream_request(prompt, params)
                tokens = [token async for update in updates for token in update.new_tokens]
            assert tokens == expected_tokens(prompt, params)
            self.answered += 1


UNKNOWN, CLIENT, ENGINE = range(3)
MALFORMED = st.tuples(st.sampled_from([UNKNOWN, CLIENT, ENGINE]), everything)
MISPLACED = st.one_of(
    st.tuples(st.just(UNKNOWN), misplaced.of_clients | misplaced.of_engines),
    st.tuples(st.just(CLIENT), misplaced.of_engines | misplaced.registrations),
    st.tuples(st.just(ENGINE), misplaced.of_clients | misplaced.connections),
)


def bombard(
    address: str, key: str | None, pid: int, messages: st.SearchStrategy[tuple[int, Frames]], count: int
) -> int:
    """Send messages as an unknown peer, as a client and as an engine, then malformed ones; returns their number."""
    sent = 0
    registration = codec.encode(Headers.REGISTER, OWN, 7, 0, "x", "RUNNING", True, [], EngineLoad(), "")
    with (
        unknown_peer(address, key) as unknown,
        unknown_peer(address, key) as client,
        unknown_peer(address, key) as engine,
    ):
        client.send_multipart(codec.encode(Headers.CONNECT, OWN, 1))
        receive(client, Headers.CONNECT_ACK)
        engine.send_multipart(registration)
        receive(engine, Headers.REGISTER_ACK)
        peers = [unknown, client, engine]

        @settings(FUZZ, max_examples=count // AT_ONCE)
        @given(st.lists(messages, min_size=AT_ONCE, max_size=AT_ONCE))
        def send(some: list[tuple[int, Frames]]) -> None:
            nonlocal sent
            for peer, frames in some:
                peers[peer].send_multipart(frames)
            sent += len(some)
            # A peer that is lost may register or connect as another one. Waiting for an answer keeps the queue short:
            # its memory is not what is measured.
            client.send_multipart(codec.encode(Headers.CONNECT, OWN, 1))
            receive(client, Headers.CONNECT_ACK)
            engine.send_multipart(codec.encode(Headers.HEARTBEAT, "RUNNING", EngineLoad()))
            assert is_alive(pid)

        send()
        for frames in ([b"\x00" * (codec.MAX_HEADER_BYTES + 1)], [b"\x91\x14"] * (codec.MAX_BATCH + 2)):
            for peer in peers:
                peer.send_multipart(frames)
                sent += 1
        # Messages are answered in order, so all earlier ones have arrived.
        for peer in (unknown, client):
            peer.send_multipart(codec.encode(Headers.CONNECT, OWN, 1))
            receive(peer, Headers.CONNECT_ACK)
        engine.send_multipart(registration)
        receive(engine, Headers.REGISTER_ACK)
    return sent


@pytest.mark.repetition
@pytest.mark.timeout(repeated(240, 1200))
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
@pytest.mark.parametrize(("messages", "kinds"), [(MALFORMED, 10), (MISPLACED, 3)], ids=["malformed", "misplaced"])
async def test_messages_that_must_be_dropped_are_counted_and_affect_no_other_peer(
    messages: st.SearchStrategy[tuple[int, Frames]], kinds: int, key: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Fleet(engine_timeout=60.0) as fleet:
        fleet.key = key
        coordinator = await fleet.spawn_coordinator()
        pid = coordinator.pid
        assert pid is not None
        for group in range(2):
            fleet.add_engine(FakeEngine(step_seconds=0.001), group=group)
        client = await fleet.connect()
        await fleet.ready(client, 2)
        epoch = client.coordinator_epoch
        started = asyncio.get_running_loop().time()
        traffic = Traffic(client)
        serving = asyncio.create_task(traffic.run())
        warm_up = await asyncio.to_thread(bombard, fleet.address, key, pid, messages, WARM_UP_MESSAGES)
        before = resident_bytes(pid)
        sent = await asyncio.to_thread(bombard, fleet.address, key, pid, messages, MESSAGES)
        traffic.ending = True
        await serving
        passed = asyncio.get_running_loop().time() - started
        state = await client.service_state()
        growth = resident_bytes(pid) / before - 1
    assert sent >= MESSAGES
    assert traffic.answered > 0
    assert state.dropped_messages == warm_up + sent
    assert client.coordinator_epoch == epoch
    assert coordinator.restarts == 0
    assert growth < MOST_GROWTH
    log = capfd.readouterr().err
    logged = re.findall(r"dropped a message: (.*) \(\d+ so far\)", log)
    assert len(logged) > kinds
    assert len(logged) <= len(set(logged)) * (passed // QUIET_SECONDS + 1)
    assert SECRET not in log


def bombard_peers(false: FalseCoordinator) -> tuple[bytes, bytes, int]:
    """Malformed messages to both: (client, engine, number of messages to each)."""
    received: dict[Headers, tuple[bytes, codec.Message]] = {}
    while len(received) < 2:
        peer, message = false.receive(Headers.CONNECT, Headers.REGISTER)
        received[message.header] = peer, message
    client, hello = received[Headers.CONNECT]
    engine, _ = received[Headers.REGISTER]
    sent = 0

    @settings(FUZZ, max_examples=80)
    @given(st.lists(answers, min_size=AT_ONCE, max_size=AT_ONCE))
    def send(messages: list[Frames]) -> None:
        nonlocal sent
        for frames in messages:
            for peer in (client, engine):
                false.send(peer, frames)
        sent += len(messages)

    send()
    false.send_message(client, Headers.CONNECT_ACK, OWN, "epoch", 0, *hello.args[1:])
    false.send_message(engine, Headers.REGISTER_ACK, OWN, "epoch")
    return client, engine, sent


def pass_on(false: FalseCoordinator, client: bytes, engine: bytes) -> None:
    """Assign one request and acknowledge its answer, as a real coordinator does."""
    _, message = false.receive(Headers.SUBMIT_REQUEST)
    (submission,) = items(message, Submission.parse)
    assignment = Assignment(submission.uuid, 1, False, 0)
    false.send_message(engine, Headers.SUBMIT_REQUEST, [assignment], bodies=message.bodies)
    _, reply = false.receive(Headers.ENGINE_REPLY)
    (finished,) = items(reply, Finished.parse)
    false.send_message(client, Headers.ENGINE_REPLY, [finished.uuid], bodies=reply.bodies)


async def test_clients_and_engines_survive_malformed_messages_of_a_coordinator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    false = FalseCoordinator(port)
    loop = EngineLoop(FakeEngine(), coordinator_address=port)
    working = asyncio.create_task(loop.run())
    client = InferenceClient(port)
    welcome = client.start()
    try:
        names_and_count: tuple[Any, ...] = await asyncio.to_thread(bombard_peers, false)
        *names, sent = names_and_count
        await welcome
        params = SamplingParams(num_tokens_to_generate=20, seed=5)
        answer = client.add_request(SECRET, params)
        await asyncio.to_thread(pass_on, false, *names)
        assert (await answer).generated_tokens == expected_tokens(SECRET, params)
        await until(lambda: loop._connection.protocol_errors.total() == sent, "the engine's count")
        assert client._dealer.protocol_errors.total() == sent
    finally:
        client.stop()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        false.close()
    assert not loop.failure
    assert SECRET not in caplog.text
    assert len(caplog.records) < 100
