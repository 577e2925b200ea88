"""The minimal coordinator in Python: a stateless ROUTER that forwards messages.

A client sends ``[request id, kind, body]``; engines receive and send the same after the client's identity.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import msgpack
import zmq
import zmq.asyncio

from coordinators.engines import STEP_SECONDS, Frames, serve_engines
from coordinators.processes import start_processes
from coordinators.protocol import CoordinatorSetup, serve

WHOLE, STREAM, PARTIAL, LAST = b"whole", b"stream", b"partial", b"last"


def forward(pipe: Connection, ready: Event, engines: int) -> None:
    """The coordinator: messages of engines have the client's identity; messages of clients go to the next engine."""
    router: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    pipe.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    known = [router.recv_multipart()[0] for _ in range(engines)]
    ready.set()
    turns = itertools.cycle(known)
    known_set = frozenset(known)
    while True:
        sender, *frames = router.recv_multipart()
        router.send_multipart(frames if sender in known_set else [next(turns), sender, *frames])


class ForwarderEngine:
    """An engine that sends complete answers at once, and streams token by token."""

    def __init__(self) -> None:
        self._streams: dict[tuple[bytes, bytes], int] = {}
        self._next_step = 0.0

    def step(self, messages: list[Frames]) -> list[Frames]:
        replies = []
        for client, request_id, kind, body in messages:
            _, answer_tokens = msgpack.unpackb(body)
            if kind == STREAM:
                self._streams[client, request_id] = answer_tokens
            else:
                replies.append([client, request_id, LAST, msgpack.packb(list(range(answer_tokens)))])
        return replies + self._stream()

    def _stream(self) -> list[Frames]:
        now = time.monotonic()
        if now < self._next_step:
            return []
        self._next_step = now + STEP_SECONDS
        self._streams = {key: left - 1 for key, left in self._streams.items() if left}
        token = msgpack.packb([1])
        return [[*key, PARTIAL if left else LAST, token] for key, left in self._streams.items()]


class Forwarder:
    """A forwarder with its engines and a client."""

    def __init__(self, coordinator: int, address: str) -> None:
        self.coordinator = coordinator
        self._socket = zmq.asyncio.Context().socket(zmq.DEALER)
        self._socket.connect(address)
        self._ids = itertools.count()
        self._counts: dict[bytes, int] = {}
        self._ends: dict[bytes, asyncio.Future[int]] = {}
        self._listener = asyncio.create_task(self._listen())

    async def ask(self, prompt: list[int], answer_tokens: int) -> int:
        return await self._send(WHOLE, prompt, answer_tokens)

    async def stream(self, prompt: list[int], answer_tokens: int) -> int:
        return await self._send(STREAM, prompt, answer_tokens)

    async def _send(self, kind: bytes, prompt: list[int], answer_tokens: int) -> int:
        request_id = next(self._ids).to_bytes(8)
        self._ends[request_id] = asyncio.get_running_loop().create_future()
        await self._socket.send_multipart([request_id, kind, msgpack.packb([prompt, answer_tokens])])
        return await self._ends[request_id]

    async def _listen(self) -> None:
        while True:
            request_id, kind, body = await self._socket.recv_multipart()
            self._counts[request_id] = self._counts.get(request_id, 0) + len(msgpack.unpackb(body))
            if kind == LAST:
                self._ends.pop(request_id).set_result(self._counts.pop(request_id))


async def deploy(setup: CoordinatorSetup, _prefix_routing: bool) -> Forwarder:
    """Ignores prefix routing, which the forwarder does not support."""
    work = partial(serve_engines, ForwarderEngine, engines=setup.engines)
    return Forwarder(*await start_processes(forward, setup.engines, work=work))


if __name__ == "__main__":
    serve(deploy, "pyzmq", "msgpack")
