"""Connections that reuse the ZeroMQ identity or the name of another one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from messaging_support.fake_engine import FakeEngine
from messaging_support.fleet import Fleet, until
from messaging_support.unknown_peer import receive, unknown_peer
from runtime_support.resident_memory import resident_bytes
from runtime_support.reused_identities import reconnect
from suite_support.repetition import repeated

from megatron_runtime.data_parallel_inference_coordinator.socket_loop import RouterSocket
from megatron_runtime.headers import Headers
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire import codec, sockets

KEY = "k" * 40
RECONNECTS = repeated(1_000, 10_000)
WARM_UP = 100
MOST_GROWTH = 0.2
"""Maximum growth of the coordinator's memory, as a share of it."""
KEPT_BY_ZEROMQ = 40_000
"""Bytes by which a connection under the identity of an open one increases the memory, at most. libzmq 4.3 keeps the
messages of such a connection, here about 20 KB, also in a bare socket; without an identity nothing is kept."""


@pytest.mark.repetition
@pytest.mark.parametrize(("identity", "name"), [(b"same", None), (None, b"same")], ids=["identity", "name"])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
async def test_a_reused_identity_or_name_does_not_end_the_coordinator(
    key: str | None, identity: bytes | None, name: bytes | None
) -> None:
    async with Fleet(engine_timeout=5.0) as fleet:
        fleet.key = key
        coordinator = await fleet.spawn_coordinator()
        fleet.add_engine(FakeEngine(step_seconds=0.001))
        client = await fleet.connect()
        await fleet.ready(client, 1)
        epoch = client.coordinator_epoch
        await asyncio.to_thread(reconnect, fleet.address, key, WARM_UP, identity=identity, name=name)
        assert coordinator.pid is not None
        before = resident_bytes(coordinator.pid)
        await asyncio.to_thread(reconnect, fleet.address, key, RECONNECTS, identity=identity, name=name)
        assert (await client.add_request("hello", SamplingParams(num_tokens_to_generate=5))).succeeded()
        assert (coordinator.restarts, client.coordinator_epoch) == (0, epoch)
        kept = 0 if identity is None else RECONNECTS * KEPT_BY_ZEROMQ
        assert resident_bytes(coordinator.pid) < (1 + MOST_GROWTH) * before + kept


@pytest.fixture
def router() -> Iterator[RouterSocket]:
    socket = RouterSocket("127.0.0.1", None, None)
    yield socket
    socket.close()


def received(router: RouterSocket, count: int) -> list[tuple[bytes, list[bytes]]]:
    """The next messages, with their peers."""
    found: list[tuple[bytes, list[bytes]]] = []
    for _ in range(100):
        router.receive(0.1, lambda peer, frames: found.append((peer, frames)))
        if len(found) >= count:
            break
    return found


def test_the_newest_connection_of_a_name_gets_the_messages_for_it(router: RouterSocket) -> None:
    with unknown_peer(router.address) as old, unknown_peer(router.address) as new:
        old.send(sockets.name_frame(b"a"))
        old.send_multipart([b"1"])
        assert received(router, 1) == [(b"a", [b"1"])]
        new.send(sockets.name_frame(b"a"))
        new.send_multipart([b"2"])
        assert received(router, 1) == [(b"a", [b"2"])]
        old.send_multipart([b"3"])
        ((peer, frames),) = received(router, 1)
        assert frames == [b"3"]
        assert peer != b"a"
        assert router.send(b"a", [b"for a"])
        assert new.poll(5000)
        assert new.recv_multipart() == [b"for a"]
        assert not old.poll(100)


def test_names_of_closed_connections_are_forgotten(router: RouterSocket) -> None:
    probe, failures = codec.encode(Headers.BEAT, "epoch"), list[Exception]()

    def is_known(name: bytes) -> bool:
        if name == b"open" and not failures:
            raise LookupError("a defect")
        return name == b"known"

    with unknown_peer(router.address) as known, unknown_peer(router.address) as open_one:
        for name, socket in ((b"known", known), (b"open", open_one)):
            socket.send(sockets.name_frame(name))
            socket.send_multipart([b"1"])
        with unknown_peer(router.address) as closed:
            closed.send(sockets.name_frame(b"closed"))
            closed.send_multipart([b"1"])
            assert {peer for peer, _ in received(router, 3)} == {b"known", b"open", b"closed"}
        for _ in range(100):
            router.forget_closed(is_known, probe, failures.append)
            if b"closed" not in router._connections:
                break
            router.receive(0.05, lambda _peer, _frames: None)
        assert router._connections.keys() == set(router._names.values()) == {b"known", b"open"}
        router.forget_closed(is_known, probe, failures.append)
        receive(open_one, Headers.BEAT)
        assert not known.poll(100)
    assert [str(failure) for failure in failures] == ["a defect"]


async def test_an_engine_that_reconnects_keeps_its_requests(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.01)
    loop = fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    future = client.add_request("hello", SamplingParams(num_tokens_to_generate=50))
    await until(engine.has_unfinished_requests, "the request at the engine")
    dealer = loop._connection._dealer
    assert dealer.socket is not None
    dealer.socket.disconnect(dealer.address)
    dealer.socket.connect(dealer.address)
    result = await future
    assert result.succeeded()
    assert len(result.generated_tokens) == 50
