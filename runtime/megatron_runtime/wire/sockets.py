"""The options of the sockets that carry messages."""

from __future__ import annotations

from typing import Any

import zmq

from megatron_runtime.wire.codec import MAX_BODY_BYTES

SEND_QUEUE_MESSAGES = 200_000
"""Messages that may wait for one slow peer; one more, and the peer counts as gone."""


def configure_socket(socket: zmq.Socket[Any]) -> None:
    """The options that all our sockets share: bounded frames and queues, and dead TCP peers noticed."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.LINGER, 0)


def configure_dealer(socket: zmq.Socket[Any], identity: bytes) -> None:
    """Options of a client's or an engine's socket; call it before connecting."""
    configure_socket(socket)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # The name may lead to another pod at the next try: a vanished address, or a process that stands still, must not
    # hold this one up for the minutes that the kernel would take.
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
