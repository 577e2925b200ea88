"""A rank detects broken connections while it waits for something else."""

from __future__ import annotations

import queue
import socket
import struct
from collections.abc import Iterator

import pytest

from megatron_runtime.parallel import link_watch
from megatron_runtime.parallel.connections import break_when_silent
from megatron_runtime.parallel.link_watch import LinkWatch

SOON = 10.0
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_watch, "_GRACE", 0.1)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        yield here, there
    here.close()
    there.close()


def reset(end: socket.socket) -> None:
    """Like the kernel of a host that has lost the state of the connection."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def test_a_broken_connection_is_reported(ends: Ends) -> None:
    here, there = ends
    told: queue.Queue[OSError] = queue.Queue()
    watch = LinkWatch([here], told.put)
    reset(there)
    assert isinstance(told.get(timeout=SOON), ConnectionResetError)
    watch.close()


def test_the_end_of_a_stream_is_not_a_broken_connection(ends: Ends) -> None:
    here, there = ends
    told: queue.Queue[OSError] = queue.Queue()
    watch = LinkWatch([here], told.put)
    there.close()
    with pytest.raises(queue.Empty):
        told.get(timeout=0.5)
    watch.close()


def test_a_rank_that_leaves_in_order_is_not_reported_and_unread_messages_extend_the_timeout(ends: Ends) -> None:
    here, there = ends
    told: queue.Queue[OSError] = queue.Queue()
    watch = LinkWatch([here], told.put)
    there.sendall(b"this is the end")
    reset(there)
    with pytest.raises(queue.Empty):
        told.get(timeout=1.0)
    watch.close()
    assert told.empty()


def test_a_connection_is_probed_while_nothing_is_sent_and_bounded_while_something_is(ends: Ends) -> None:
    here, _ = ends
    break_when_silent(here)
    assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    idle, interval, count, silence = (here.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
    assert idle + interval * count == silence / 1000 == 10
