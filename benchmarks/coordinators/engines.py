"""Minimal engines for other coordinators, which answer at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import zmq

STEP_SECONDS = 0.01
"""Seconds between two tokens of a stream."""

Frames = list[bytes]


class ThinEngine(Protocol):
    def step(self, messages: list[Frames]) -> list[Frames]:
        """Processes new messages and returns the replies; called at least every STEP_SECONDS."""
        ...


def serve_engines(make_engine: Callable[[], ThinEngine], address: str, engines: int) -> None:
    """Registers with an empty frame, as Megatron's engines do, and runs forever."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    pool = {context.socket(zmq.DEALER): make_engine() for _ in range(engines)}
    for number, socket in enumerate(pool):
        socket.setsockopt(zmq.IDENTITY, f"mp-coord-{number}".encode())
        socket.connect(address)
        socket.send(b"")
        poller.register(socket, zmq.POLLIN)
    while True:
        poller.poll(STEP_SECONDS * 1000)
        for socket, engine in pool.items():
            for message in engine.step(_everything(socket)):
                socket.send_multipart(message)


def _everything(socket: zmq.Socket[bytes]) -> list[Frames]:
    messages = []
    while True:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return messages
