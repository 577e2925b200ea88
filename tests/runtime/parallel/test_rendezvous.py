"""The rendezvous of the ranks of a replica group."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_runtime.errors import ConfigurationError, LostRankError
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.rendezvous import Rendezvous, meet_world

FIRST, SECOND = (ParallelSizes(tensor=2).position_in_replica_group(rank) for rank in (0, 1))


def test_replica_groups_use_the_same_port_at_different_addresses() -> None:
    here = Rendezvous(FIRST, "127.0.0.1", 0)
    there = Rendezvous(FIRST, "127.0.0.2", here.port)
    for place in (here, there):
        host, _, port = place.address.rpartition(":")
        other = Rendezvous(SECOND, host, int(port))
        with ThreadPoolExecutor() as pool:
            pool.submit(other.await_all, 10.0)
            place.await_all(10.0).set("it", host)
        assert other.connect(10.0).get("it").decode() == host


def test_ranks_of_another_attempt_are_not_met() -> None:
    now = Rendezvous(FIRST, "127.0.0.1", 0, attempt=5)
    before = Rendezvous(SECOND, "127.0.0.1", now.port, attempt=4)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(before.await_all, 0.5)
        with pytest.raises(LostRankError, match="rank 1 did not join") as caught:
            now.await_all(0.5)
        assert caught.value.missing == (1,)
        assert isinstance(late.exception(20.0), LostRankError)


def test_a_port_that_is_taken_is_named() -> None:
    here = Rendezvous(FIRST, "127.0.0.1", 0)
    with pytest.raises(ConfigurationError, match=rf"rendezvous at 127\.0\.0\.1:{here.port}: can't listen there"):
        Rendezvous(FIRST, "127.0.0.1", here.port)
    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigurationError, match="choose a free port"):
        meet_world(0, 2, "127.0.0.1", taken.getsockname()[1], timeout=3.0, is_kept=False)
