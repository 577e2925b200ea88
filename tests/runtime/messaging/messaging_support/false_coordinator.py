"""A socket that clients and engines connect to, and that sends arbitrary messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from megatron_runtime.headers import Headers
from megatron_runtime.wire import codec, sockets


class FalseCoordinator:
    """Listens on a loopback port."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port}")

    def receive(self, *headers: Headers) -> tuple[bytes, codec.Message]:
        """The next message of one of these types, and its sender."""
        while self._socket.poll(20_000):
            peer, *frames = self._socket.recv_multipart()
            if sockets.name_in(frames) is not None:
                continue
            if (message := codec.decode(frames)).header in headers:
                return peer, message
        pytest.fail(f"none of {headers} came")

    def send_message(self, peer: bytes, header: Headers, *args: Any, bodies: Sequence[bytes] = ()) -> None:
        """Send a valid message."""
        self.send(peer, codec.encode(header, *args, bodies=bodies))

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Send arbitrary frames."""
        self._socket.send_multipart([peer, *frames])

    def close(self) -> None:
        """Close the socket without a message."""
        self._socket.close()
        self._context.term()
