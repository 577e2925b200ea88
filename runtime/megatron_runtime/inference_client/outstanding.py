"""A client's records of outstanding requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_runtime.inference_client.result import StreamUpdate
from megatron_runtime.wire.bodies import RequestBody, TokenChunk


class RequestFuture(asyncio.Future[Any]):
    """The future of one request. Cancelling it aborts the request.

    Attributes:
        request_id: The client's own number, for `InferenceClient.abort_request`.
        request_uuid: 16 bytes that identify the request everywhere.
    """

    def __init__(self, request_id: int, request_uuid: bytes, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.request_id = request_id
        self.request_uuid = request_uuid


@dataclass(frozen=True)
class SubmittedBody:
    """What is sent of a request, packed and hashed once for all requests that differ in their seeds alone."""

    content: RequestBody
    packed: bytes
    hashes: list[int]
    seed: int | None = None
    """In place of the content's, which other requests may share."""

    def with_seed(self, seed: int | None) -> SubmittedBody:
        """The same for one of the requests; None chooses the seed."""
        return replace(self, seed=secrets.randbits(63) if seed is None else seed)


@dataclass(eq=False)
class Outstanding:
    """One request from its submission to its answer or error."""

    body: RequestBody
    packed: bytes
    """The body as it was submitted."""
    hashes: list[int]
    seed: int | None
    """As of its SubmittedBody."""
    future: RequestFuture
    on_update: Callable[[StreamUpdate], None] | None
    """Called with new tokens; None for a request that does not stream."""
    aborted: bool = False
    timer: asyncio.TimerHandle | None = None
    submitted: float = field(default_factory=time.perf_counter)

    @property
    def received(self) -> TokenChunk:
        """The tokens that the client has received; part of the body, so that a resubmission has them."""
        return self.body.generated

    def pack(self) -> bytes:
        """The body frame of a (re-)submission."""
        return self.body.pack() if self.received.tokens else self.packed


class RequestStream:
    """The updates of a streaming request; the last one has the finished request.

    Iterating raises the error of a request that ended without an answer. `aclose` aborts an unfinished request.
    """

    def __init__(self) -> None:
        self._updates: deque[StreamUpdate] = deque()
        self._changed = asyncio.Event()
        self._future: RequestFuture | None = None
        self._closed = False

    @property
    def request_id(self) -> int:
        """The client's own number of the request, for `InferenceClient.abort_request`."""
        assert self._future is not None
        return self._future.request_id

    def attach(self, future: RequestFuture) -> None:
        """Stream this request."""
        self._future = future
        future.add_done_callback(lambda _: self._changed.set())

    def push(self, update: StreamUpdate) -> None:
        """Add an update."""
        self._updates.append(update)
        self._changed.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamUpdate:
        assert self._future is not None
        while not self._updates:
            if self._closed:
                raise StopAsyncIteration
            if self._future.done():
                self._closed = True
                self._future.result()
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._updates.popleft()

    async def aclose(self) -> None:
        """End the stream; there are no more updates."""
        self._closed = True
        self._updates.clear()
        self._changed.set()
        if self._future is not None and not self._future.done():
            self._future.cancel()
