"""The ZeroMQ options of the coordinator's and its peers' sockets."""

from __future__ import annotations

from typing import Any

import zmq

from megatron_runtime.wire.codec import MAX_BODY_BYTES

SEND_QUEUE_MESSAGES = 200_000
"""Most queued messages for one peer; a peer with a full queue counts as lost."""


def configure_socket(socket: zmq.Socket[Any]) -> None:
    """Options of all sockets: bounded frames and queues, and heartbeats that detect dead TCP peers."""
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
    # At the next attempt the name may resolve to another pod: an unreachable address or a hanging process must not
    # block the connection for minutes, as the timeouts of the kernel would.
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
