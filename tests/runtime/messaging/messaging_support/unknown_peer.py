"""A socket at the coordinator that is neither a client nor an engine, and sends arbitrary messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from megatron_runtime.headers import Headers
from megatron_runtime.wire import codec
from megatron_runtime.wire.security import secure_client


@contextmanager
def unknown_peer(address: str, key: str | None = None) -> Iterator[zmq.Socket[bytes]]:
    """Connect, or try to."""
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
