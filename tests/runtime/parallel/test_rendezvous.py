"""The rendezvous of the ranks of a replica group."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_runtime.errors import ConfigurationError, LostRankError
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.rendezvous import Rendezvous, meet_world
from megatron_runtime.parallel.store_proxy import MAX_UNAUTHENTICATED, NONCE_BYTES, PROOF_BYTES

KEY = "k" * 32
FIRST, SECOND = (ParallelSizes(tensor=2).position_in_replica_group(rank) for rank in (0, 1))


def test_replica_groups_use_the_same_port_at_different_addresses() -> None:
    here = Rendezvous(FIRST, "127.0.0.1", 0, key=KEY)
    there = Rendezvous(FIRST, "127.0.0.2", here.port, key=KEY)
    for place in (here, there):
        host, _, port = place.address.rpartition(":")
        other = Rendezvous(SECOND, host, int(port), key=KEY)
        with ThreadPoolExecutor() as pool:
            pool.submit(other.await_all, 10.0)
            place.await_all(10.0).set("it", host)
        assert other.connect(10.0).get("it").decode() == host


def test_ranks_of_another_attempt_are_not_met() -> None:
    now = Rendezvous(FIRST, "127.0.0.1", 0, key=KEY, attempt=5)
    before = Rendezvous(SECOND, "127.0.0.1", now.port, key=KEY, attempt=4)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(before.await_all, 0.5)
        with pytest.raises(LostRankError, match="rank 1 did not join") as caught:
            now.await_all(0.5)
        assert caught.value.missing == (1,)
        assert isinstance(late.exception(20.0), LostRankError)


def test_a_port_that_is_taken_is_named() -> None:
    here = Rendezvous(FIRST, "127.0.0.1", 0, key=KEY)
    with pytest.raises(ConfigurationError, match=rf"rendezvous at 127\.0\.0\.1:{here.port}: can't listen there"):
        Rendezvous(FIRST, "127.0.0.1", here.port, key=KEY)
    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigurationError, match="choose a free port"):
        meet_world(0, 2, "127.0.0.1", taken.getsockname()[1], timeout=3.0, is_kept=False)


def test_a_rank_with_another_key_is_not_admitted() -> None:
    first = Rendezvous(FIRST, "127.0.0.1", 0, key=KEY)
    stranger = Rendezvous(SECOND, "127.0.0.1", first.port, key="another key")
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(stranger.await_all, 0.5)
        with pytest.raises(LostRankError, match="rank 1 did not join"):
            first.await_all(0.5)
        with pytest.raises(LostRankError, match="did not accept the key of this rank"):
            refused.result(20.0)


def test_a_rank_gives_nothing_to_a_store_with_another_key() -> None:
    answers = bytes(NONCE_BYTES + PROOF_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as false_store, ThreadPoolExecutor() as pool:
        rank = Rendezvous(SECOND, "127.0.0.1", false_store.getsockname()[1], key=KEY)
        attempt = pool.submit(rank.connect, 5.0)
        peer, _ = false_store.accept()
        with peer:
            peer.sendall(answers)
            received = b"".join(iter(lambda: peer.recv(4096), b""))
        with pytest.raises(RuntimeError, match="has another key than this rank"):
            attempt.result(20.0)
    assert len(received) == NONCE_BYTES + PROOF_BYTES
    assert KEY.encode() not in received


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(NONCE_BYTES + PROOF_BYTES), bytes(100_000)])
def test_connections_without_the_key_reach_no_store_and_keep_out_no_rank(sent: bytes) -> None:
    first = Rendezvous(FIRST, "127.0.0.1", 0, key=KEY)
    with contextlib.ExitStack() as connections:
        strangers = [
            connections.enter_context(socket.create_connection(("127.0.0.1", first.port)))
            for _ in range(2 * MAX_UNAUTHENTICATED)
        ]
        for stranger in strangers:
            with contextlib.suppress(OSError):  # the oldest ones are closed already
                stranger.sendall(sent)
        first.connect(10.0).set("it", "works")
        second = Rendezvous(SECOND, "127.0.0.1", first.port, key=KEY)
        assert second.connect(10.0).get("it") == b"works"
        strangers[0].settimeout(20.0)
        with contextlib.suppress(ConnectionResetError):
            assert len(b"".join(iter(lambda: strangers[0].recv(4096), b""))) <= NONCE_BYTES


def test_the_store_and_its_port_end_with_the_rendezvous() -> None:
    first = Rendezvous(FIRST, "127.0.0.1", 0, key=KEY)
    port, store = first.port, first.connect(5.0)
    del first
    with pytest.raises(RuntimeError):
        store.check(["it"])
    Rendezvous(FIRST, "127.0.0.1", port, key=KEY)
