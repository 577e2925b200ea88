"""Invalid messages to the coordinator do not affect valid ones."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until
from messaging_support.unknown_peer import receive, unknown_peer

from megatron_runtime.errors import CoordinatorError
from megatron_runtime.headers import Headers
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.items import EngineLoad, Finished, Progress, Submission
from megatron_runtime.wire.protocol_version import OWN

PARAMS = SamplingParams(num_tokens_to_generate=20, seed=5)
KEY = "k" * 40


async def test_an_empty_frame_does_not_register_an_engine(fleet: Fleet) -> None:
    client = await fleet.connect()
    with unknown_peer(fleet.address) as unknown:
        unknown.send(b"")
        future = client.add_request("secret", PARAMS)
        await until(lambda: fleet.coordinator and fleet.coordinator.next_request_id, "the submission")
        state = await client.service_state()
        assert state.engines == ()
        assert state.unassigned_requests == 1
        assert not unknown.poll(200)
        fleet.add_engine()
        assert (await future).succeeded()


async def test_messages_of_an_unknown_peer_have_no_effect_and_it_is_asked_to_register(fleet: Fleet) -> None:
    client = await fleet.connect()
    for message in (
        codec.encode(Headers.PAUSE, 1, 5.0, True),
        codec.encode(Headers.SHUTDOWN),
        codec.encode(Headers.HEARTBEAT, "RUNNING", EngineLoad()),
        codec.encode(Headers.ENGINE_REPLY, [Finished(bytes(16), 1)], bodies=[b"x"]),
    ):
        with unknown_peer(fleet.address) as unknown:
            unknown.send_multipart(message)
            assert unknown.poll(5000)
            assert codec.decode(unknown.recv_multipart()).header is Headers.UNKNOWN_PEER
    assert (await client.service_state()).state == "RUNNING"


@pytest.mark.parametrize(("call_id", "timeout"), [("first", 5.0), (-1, 5.0), (1, "soon"), (1, float("nan"))])
async def test_an_invalid_broadcast_reaches_no_engine(fleet: Fleet, call_id: object, timeout: object) -> None:
    engine = FakeEngine()
    fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    with unknown_peer(fleet.address) as careless:
        careless.send_multipart(codec.encode(Headers.CONNECT, OWN, 1))
        receive(careless, Headers.CONNECT_ACK)
        careless.send_multipart(codec.encode(Headers.SET_GENERATION_EPOCH, call_id, timeout, 7))
        dropped = 0
        while not dropped:
            dropped = (await client.service_state()).dropped_messages
        # The engine has received what was sent to it before its next request.
        assert (await client.add_request("after it", PARAMS)).succeeded()
    assert engine.epochs == []


async def test_an_engine_can_not_answer_a_request_of_another_engine(fleet: Fleet) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.005))
    client = await fleet.connect()
    await fleet.ready(client, 1)
    name = b"n" * 16
    future = client.add_request("mine", PARAMS, request_uuid=name)
    with unknown_peer(fleet.address) as liar:
        load = EngineLoad()
        liar.send_multipart(codec.encode(Headers.REGISTER, OWN, 5, 0, "liar", "RUNNING", True, [], load, ""))
        liar.send_multipart(codec.encode(Headers.ENGINE_REPLY_PARTIAL, [Progress(name, 1, 0, 1)], bodies=[b"x"]))
        liar.send_multipart(codec.encode(Headers.ENGINE_REPLY, [Finished(name, 1)], bodies=[b"x"]))
        assert (await future).generated_tokens == expected_tokens("mine", PARAMS)


async def test_an_undecodable_reply_fails_only_its_request(fleet: Fleet) -> None:
    client = await fleet.connect()
    with unknown_peer(fleet.address) as engine:
        engine.send_multipart(codec.encode(Headers.REGISTER, OWN, 0, 0, "x", "RUNNING", False, [], EngineLoad(), ""))
        name = b"n" * 16
        future = client.add_request("hello", PARAMS, request_uuid=name)
        await until(lambda: fleet.coordinator and fleet.coordinator.request_id_to_client_id, "the submission")
        engine.send_multipart(codec.encode(Headers.ENGINE_REPLY, [Finished(name, 1)], bodies=[b"\xc1"]))
        with pytest.raises(Exception, match="can't be decoded"):
            await future


async def test_undecodable_stored_tokens_fail_their_request_when_the_engine_is_lost(fleet: Fleet) -> None:
    client = await fleet.connect()
    name = b"n" * 16
    with unknown_peer(fleet.address) as engine:
        engine.send_multipart(codec.encode(Headers.REGISTER, OWN, 0, 0, "x", "RUNNING", False, [], EngineLoad(), ""))
        await fleet.ready(client, 1)
        future = client.add_request("hello", PARAMS, request_uuid=name)
        await until(lambda: fleet.coordinator and fleet.coordinator.request_id_to_client_id, "the submission")
        engine.send_multipart(codec.encode(Headers.ENGINE_REPLY_PARTIAL, [Progress(name, 1, 0, 1)], bodies=[b"\xc1"]))
        await until(lambda: fleet.coordinator._core.dispatcher.requests[name].token_count, "the report")  # type: ignore[union-attr]
        fleet.add_engine(group=1)
        await fleet.ready(client, 2)
    with pytest.raises(Exception, match="can't be decoded for another engine"):
        await future
    assert (await client.add_request("hello", PARAMS)).succeeded()


async def test_a_submission_with_an_undecodable_body_ends_as_failed(fleet: Fleet) -> None:
    fleet.add_engine()
    with unknown_peer(fleet.address) as client:
        client.send_multipart(codec.encode(Headers.CONNECT, OWN, 1))
        submission = Submission(b"n" * 16, False, 0, [])
        client.send_multipart(codec.encode(Headers.SUBMIT_REQUEST, [submission], bodies=[b"\xc1"]))
        replies = await asyncio.to_thread(lambda: receive(client, Headers.ENGINE_REPLY))
    assert codec.unpack_body(replies.bodies[0])["status"] == "FAILED"


async def test_an_oversized_frame_closes_only_the_connection_of_its_sender(fleet: Fleet) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.002))
    client = await fleet.connect()
    future = client.add_request("hello", PARAMS)
    with unknown_peer(fleet.address) as unknown:
        monitor = unknown.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        unknown.send_multipart([b"\x91\x14", bytes(codec.MAX_BODY_BYTES + 1)])
        assert await asyncio.to_thread(monitor.poll, 20_000)
        unknown.disable_monitor()
        monitor.close()
    assert (await future).generated_tokens == expected_tokens("hello", PARAMS)


async def test_a_request_that_can_not_be_hashed_does_not_affect_others() -> None:
    async with Fleet(enable_prefix_caching=True, block_size_tokens=4) as fleet:
        fleet.start_coordinator()
        fleet.add_engine()
        with unknown_peer(fleet.address) as client:
            client.send_multipart(codec.encode(Headers.CONNECT, OWN, 1))
            names = [b"a" * 16, b"b" * 16]
            bodies = [b"\xc1", RequestBody("hello", PARAMS.serialize()).pack()]
            submissions = [Submission(name, False, 0, []) for name in names]
            client.send_multipart(codec.encode(Headers.SUBMIT_REQUEST, submissions, bodies=bodies))
            answers = {}
            while len(answers) < len(names):
                replies = await asyncio.to_thread(receive, client, Headers.ENGINE_REPLY)
                answers |= dict(zip(replies.args[0], replies.bodies, strict=True))
    assert codec.unpack_body(answers[names[0]])["status"] == "FAILED"
    assert codec.unpack_body(answers[names[1]])["generated_tokens"] == expected_tokens("hello", PARAMS)


async def test_only_peers_with_the_right_key_can_connect() -> None:
    async with Fleet(key=KEY) as fleet:
        fleet.start_coordinator()
        fleet.add_engine()
        client = await fleet.connect()
        assert (await client.add_request("hello", PARAMS)).generated_tokens == expected_tokens("hello", PARAMS)
        for wrong in ("w" * 40, None):
            dropped = (await client.service_state()).dropped_messages
            with unknown_peer(fleet.address, wrong) as unknown:
                unknown.send_multipart(codec.encode(Headers.CONNECT, OWN, 1))
                assert not unknown.poll(300)
            assert (await client.service_state()).dropped_messages > dropped
        fleet.key = "w" * 40
        with pytest.raises(CoordinatorError, match="no answer from a coordinator"):
            await fleet.connect(coordinator_timeout=1.0)


def test_a_prompt_in_a_body_of_another_shape_is_malformed() -> None:
    for content in ([1, {}, [[], [], []]], ["x", [], [[], [], []]], ["x", {}, [["a"], [], []]], ["x"], None):
        with pytest.raises(codec.MalformedMessage):
            RequestBody.unpack(codec.pack_body(content))
