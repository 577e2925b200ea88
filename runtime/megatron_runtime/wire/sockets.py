"""The ZeroMQ options of the coordinator's and its peers' sockets, and the names of peers.

A peer has no ZeroMQ identity, so that each connection gets a new one: a ROUTER socket with ``ROUTER_HANDOVER`` ends its
process when a peer reconnects under an identity whose old connection still sends. The first message of a connection is
the name of the peer instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from megatron_runtime.wire.codec import MAX_BODY_BYTES

SEND_QUEUE_MESSAGES = 200_000
"""Most queued messages for one peer; a peer with a full queue counts as lost."""

_NAME_MARK = b"\xc1"
"""First byte of a message with a name; no msgpack value begins with it."""
LONGEST_NAME = 255


def name_frame(name: bytes) -> bytes:
    """The message by which a peer names itself."""
    return _NAME_MARK + name


def name_in(frames: Sequence[bytes]) -> bytes | None:
    """The name in such a message; None for other messages."""
    if len(frames) != 1 or frames[0][:1] != _NAME_MARK or not 1 < len(frames[0]) <= LONGEST_NAME + 1:
        return None
    return frames[0][1:]


def configure_socket(socket: zmq.Socket[Any]) -> None:
    """Options of all sockets: bounded frames and queues, and heartbeats that detect dead TCP peers."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.LINGER, 0)


def configure_dealer(socket: zmq.Socket[Any]) -> None:
    """Options of a client's or an engine's socket; call it before connecting."""
    configure_socket(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # At the next attempt the name may resolve to another pod: an unreachable address or a hanging process must not
    # block the connection for minutes, as the timeouts of the kernel would.
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
