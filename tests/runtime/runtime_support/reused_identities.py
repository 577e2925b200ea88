"""Connections to a coordinator that reuse the ZeroMQ identity or the name of another one."""

from __future__ import annotations

import zmq

from megatron_runtime.headers import Headers
from megatron_runtime.wire import codec, sockets
from megatron_runtime.wire.items import Finished
from megatron_runtime.wire.security import secure_client

REPEATED = 4
"""Each connection sends malformed and misplaced messages, so many times each."""
OVERLAPPING = 5
"""Connections with the same identity that are open at a time."""
RECONNECTS = 50


def reuse_identities(address: str, key: str | None) -> None:
    """Connect ``RECONNECTS`` times under the same identity, and as often under the same name."""
    for identity, name in ((b"same", None), (None, b"same")):
        reconnect(address, key, RECONNECTS, identity=identity, name=name)


def reconnect(address: str, key: str | None, times: int, *, identity: bytes | None, name: bytes | None) -> None:
    """Connect again and again under the same identity or name, while older connections still send.

    What they send is malformed, or not for them to send.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []
    messages = [
        [*codec.encode(Headers.HEARTBEAT), b"x" * 1000],
        codec.encode(Headers.ABORT_REQUEST, [bytes(16)]),
        codec.encode(Headers.ENGINE_REPLY, [Finished(bytes(16), 1)], bodies=[b"x" * 1000]),
        codec.encode(Headers.SHUTDOWN),
        [b"\xc1" * 100],
    ]
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
        for frames in messages * REPEATED:
            socket.send_multipart(frames, zmq.NOBLOCK)
        opened.append(socket)
        if len(opened) > OVERLAPPING:
            opened.pop(0).close()
    for socket in opened:
        socket.close()
    context.term()
