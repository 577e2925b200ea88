"""Connections to a coordinator that reuse the ZeroMQ identity or the name of another one."""

from __future__ import annotations

import zmq

from megatron_runtime.headers import Headers
from megatron_runtime.wire import codec, sockets
from megatron_runtime.wire.security import secure_client

OVERLAPPING = 5
"""Connections with the same identity that are open at a time."""


def reconnect(address: str, key: str | None, times: int, *, identity: bytes | None, name: bytes | None) -> None:
    """Connect again and again under the same identity or name, while older connections still send."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []
    beat = codec.encode(Headers.HEARTBEAT)
    for _ in range(times):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        if key is not None:
            secure_client(socket, key)
        socket.connect(address)
        if name is not None:
            socket.send(sockets.name_frame(name), zmq.NOBLOCK)
        for _ in range(20):
            socket.send_multipart([*beat, b"x" * 1000], zmq.NOBLOCK)
        opened.append(socket)
        if len(opened) > OVERLAPPING:
            opened.pop(0).close()
    for socket in opened:
        socket.close()
    context.term()
