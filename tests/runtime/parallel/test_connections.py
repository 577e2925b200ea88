"""Connections between ranks, at a port that others can reach."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megatron_runtime.parallel import connections
from megatron_runtime.parallel.connections import Listener, connect, read

HERE = "127.0.0.1"
TIMEOUT = 10.0


def test_unknown_connections_do_not_disturb_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_GREETING_SECONDS", 0.2)
    store = HashStore()
    listener = Listener(store, "inbox", HERE, TIMEOUT)
    port = int(store.get("listener/inbox").decode().split()[1])
    leaves, is_silent, guesses = (socket.create_connection((HERE, port)) for _ in range(3))
    leaves.close()
    guesses.sendall(bytes(24))
    with ThreadPoolExecutor() as pool:
        accepted = pool.submit(listener.accept, 1)
        ours = connect(store, "inbox", 3, TIMEOUT)
        found = accepted.result(TIMEOUT)
    ours.sendall(b"hello")
    assert {rank: read(end, 5) for rank, end in found.items()} == {3: b"hello"}
    for end in (is_silent, guesses, ours, *found.values()):
        end.close()


def test_ranks_wait_for_a_missing_rank_up_to_the_timeout() -> None:
    with pytest.raises(TimeoutError):
        Listener(HashStore(), "inbox", HERE, 0.1).accept(1)
