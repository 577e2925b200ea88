"""A socket that clients and engines connect to, and that says whatever it likes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from megatron_runtime.headers import Headers
from megatron_runtime.wire import codec


class FalseCoordinator:
    """Listens at a port of the loopback."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port}")

    def hear(self, *headers: Headers) -> tuple[bytes, codec.Message]:
        """The next message of one of these types, and who sent it."""
        while self._socket.poll(20_000):
            peer, *frames = self._socket.recv_multipart()
            if (message := codec.decode(frames)).header in headers:
                return peer, message
        pytest.fail(f"none of {headers} came")

    def say(self, peer: bytes, header: Headers, *args: Any, bodies: Sequence[bytes] = ()) -> None:
        """A proper message."""
        self.send(peer, codec.encode(header, *args, bodies=bodies))

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Anything."""
        self._socket.send_multipart([peer, *frames])

    def close(self) -> None:
        """Without a word."""
        self._socket.close()
        self._context.term()
