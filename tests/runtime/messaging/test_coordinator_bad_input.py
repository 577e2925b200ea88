"""Whatever is sent to the coordinator: it lives on, and real traffic goes undisturbed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import pytest
import zmq
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until

from megatron_runtime.errors import CoordinatorError
from megatron_runtime.headers import Headers
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.items import EngineLoad, Finished, Progress, Registration, Submission
from megatron_runtime.wire.security import secure_client

PARAMS = SamplingParams(num_tokens_to_generate=20, seed=5)
KEY = "k" * 40


@contextmanager
def stranger(address: str, key: str | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A socket that says whatever it likes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if key is not None:
        secure_client(socket, key)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def receive(socket: zmq.Socket[bytes], header: Headers) -> codec.Message:
    """The next message of this type."""
    while socket.poll(10_000):
        message = codec.decode(socket.recv_multipart())
        if message.header is header:
            return message
    pytest.fail(f"no {header.name} came")


def malformed(rng: random.Random) -> list[bytes]:
    """A message that is wrong in one of many ways, from random bytes to almost right."""
    anything = [
        None,
        -1,
        2**70,
        "x",
        b"y" * 16,
        [],
        {},
        True,
        1.5,
        [[]],
        [[bytes(16), 1, 2, 3]],
        EngineLoad(),
        "RUNNING",
    ]
    kind = rng.randrange(4)
    if kind == 0:
        return [rng.randbytes(rng.randrange(30)) for _ in range(rng.randrange(4))] or [b""]
    if kind == 1:
        return [b""] * rng.randrange(1, 4)
    number = rng.choice([*(header for header in Headers if header is not Headers.SHUTDOWN), 99, -5])
    args = [rng.choice(anything) for _ in range(rng.randrange(8))]
    header: bytes = msgpack.packb([int(number), *(value for value in args if value != 2**70)])
    if kind == 2:
        header = header[: rng.randrange(len(header))] or b"\xc1"
    return [header, *(rng.randbytes(8) for _ in range(rng.randrange(3)))]


async def test_malformed_messages_from_strangers_clients_and_engines_disturb_nobody(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.002)
    fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    rng = random.Random(7)
    with stranger(fleet.address) as unknown, stranger(fleet.address) as known, stranger(fleet.address) as registered:
        known.send_multipart(codec.encode(Headers.CONNECT))
        registration = Registration(7, 0, "x", "RUNNING", True, [], EngineLoad())  # type: ignore[arg-type]
        registered.send_multipart(codec.encode(Headers.REGISTER, *registration[:3], "RUNNING", *registration[4:]))
        for turn in range(20):
            futures = [client.add_request(f"{turn} {number}", PARAMS) for number in range(3)]
            for _ in range(100):
                rng.choice([unknown, known, registered]).send_multipart(malformed(rng))
            results = await asyncio.gather(*futures)
            assert [result.generated_tokens for result in results] == [
                expected_tokens(f"{turn} {number}", PARAMS) for number in range(3)
            ]
    state = await client.service_state()
    assert state.dropped_messages > 1000


async def test_an_empty_frame_from_a_stranger_does_not_make_it_an_engine(fleet: Fleet) -> None:
    client = await fleet.connect()
    with stranger(fleet.address) as unknown:
        unknown.send(b"")
        future = client.add_request("secret", PARAMS)
        await until(lambda: fleet.coordinator and fleet.coordinator.next_request_id, "the submission")
        state = await client.service_state()
        assert state.engines == ()
        assert state.unassigned_requests == 1
        assert not unknown.poll(200)
        fleet.add_engine()
        assert (await future).succeeded()


async def test_a_stranger_is_told_to_introduce_itself_and_its_messages_have_no_effect(fleet: Fleet) -> None:
    client = await fleet.connect()
    with stranger(fleet.address) as unknown:
        for message in (
            codec.encode(Headers.PAUSE, 1, 5.0),
            codec.encode(Headers.SHUTDOWN),
            codec.encode(Headers.HEARTBEAT, "RUNNING", EngineLoad()),
            codec.encode(Headers.ENGINE_REPLY, [Finished(bytes(16), 1)], bodies=[b"x"]),
        ):
            unknown.send_multipart(message)
            assert unknown.poll(5000)
            assert codec.decode(unknown.recv_multipart()).header is Headers.UNKNOWN_PEER
    assert (await client.service_state()).state == "RUNNING"


async def test_an_engine_can_not_answer_a_request_of_another_engine(fleet: Fleet) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.005))
    client = await fleet.connect()
    await fleet.ready(client, 1)
    name = b"n" * 16
    future = client.add_request("mine", PARAMS, request_uuid=name)
    with stranger(fleet.address) as liar:
        load = EngineLoad()
        liar.send_multipart(codec.encode(Headers.REGISTER, 5, 0, "liar", "RUNNING", True, [], load))
        liar.send_multipart(codec.encode(Headers.ENGINE_REPLY_PARTIAL, [Progress(name, 1, 0, 1)], bodies=[b"x"]))
        liar.send_multipart(codec.encode(Headers.ENGINE_REPLY, [Finished(name, 1)], bodies=[b"x"]))
        assert (await future).generated_tokens == expected_tokens("mine", PARAMS)


async def test_a_reply_that_nobody_can_read_is_an_error_for_its_request_only(fleet: Fleet) -> None:
    client = await fleet.connect()
    with stranger(fleet.address) as engine:
        engine.send_multipart(codec.encode(Headers.REGISTER, 0, 0, "x", "RUNNING", False, [], EngineLoad()))
        name = b"n" * 16
        future = client.add_request("hello", PARAMS, request_uuid=name)
        await until(lambda: fleet.coordinator and fleet.coordinator.request_id_to_client_id, "the submission")
        engine.send_multipart(codec.encode(Headers.ENGINE_REPLY, [Finished(name, 1)], bodies=[b"\xc1"]))
        with pytest.raises(Exception, match="can't be read"):
            await future


async def test_stored_tokens_that_nobody_can_read_fail_their_request_when_the_engine_is_lost(fleet: Fleet) -> None:
    client = await fleet.connect()
    name = b"n" * 16
    with stranger(fleet.address) as engine:
        engine.send_multipart(codec.encode(Headers.REGISTER, 0, 0, "x", "RUNNING", False, [], EngineLoad()))
        await fleet.ready(client, 1)
        future = client.add_request("hello", PARAMS, request_uuid=name)
        await until(lambda: fleet.coordinator and fleet.coordinator.request_id_to_client_id, "the submission")
        engine.send_multipart(codec.encode(Headers.ENGINE_REPLY_PARTIAL, [Progress(name, 1, 0, 1)], bodies=[b"\xc1"]))
        await until(lambda: fleet.coordinator._core.dispatcher.requests[name].token_count, "the report")  # type: ignore[union-attr]
        fleet.add_engine(group=1)
        await fleet.ready(client, 2)
    with pytest.raises(Exception, match="can't be handed to another engine"):
        await future
    assert (await client.add_request("hello", PARAMS)).succeeded()


async def test_a_submission_with_a_body_that_nobody_can_read_comes_back_failed(fleet: Fleet) -> None:
    fleet.add_engine()
    with stranger(fleet.address) as client:
        client.send_multipart(codec.encode(Headers.CONNECT))
        submission = Submission(b"n" * 16, False, 0, [])
        client.send_multipart(codec.encode(Headers.SUBMIT_REQUEST, [submission], bodies=[b"\xc1"]))
        replies = await asyncio.to_thread(lambda: receive(client, Headers.ENGINE_REPLY))
    assert codec.unpack_body(replies.bodies[0])["status"] == "FAILED"


async def test_only_the_right_key_is_let_in() -> None:
    async with Fleet(key=KEY) as fleet:
        fleet.start_coordinator()
        fleet.add_engine()
        client = await fleet.connect()
        assert (await client.add_request("hello", PARAMS)).generated_tokens == expected_tokens("hello", PARAMS)
        for wrong in ("w" * 40, None):
            with stranger(fleet.address, wrong) as unknown:
                unknown.send_multipart(codec.encode(Headers.CONNECT))
                assert not unknown.poll(300)
        fleet.key = "w" * 40
        with pytest.raises(CoordinatorError, match="no coordinator has answered"):
            await fleet.connect(coordinator_timeout=1.0)


def test_a_prompt_in_a_body_of_another_shape_is_malformed() -> None:
    for content in ([1, {}, [[], [], []]], ["x", [], [[], [], []]], ["x", {}, [["a"], [], []]], ["x"], None):
        with pytest.raises(codec.MalformedMessage):
            RequestBody.unpack(codec.pack_body(content))
