"""Server-sent events, and the end of work for clients that have left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Protocol

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_runtime.server.errors import ApiError, unexpected
from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.json_response import to_json

logger = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies must pass each event on at once."""

Chunk = Mapping[str, Any]


class Chunks(Protocol):
    """Writes the chunks of one stream."""

    def opening(self) -> Iterable[Chunk]:
        """Those before the first delta."""
        ...

    def take(self, delta: Delta) -> Iterable[Chunk]:
        """Those that a delta makes."""
        ...

    def ending(self) -> Iterable[Chunk]:
        """Those after the last delta."""
        ...

    def failure(self, error: ApiError) -> Iterable[Chunk]:
        """The end of a stream that can't go on."""
        ...


class EventStream(StreamingResponse):
    """``text/event-stream`` of JSON chunks that ends with ``[DONE]``, or with an error in OpenAI's shape.

    Deltas that have come together leave together. With ``names_events`` each chunk is an event named by its ``type``,
    and the last one says itself that it is over. When the client leaves, ``deltas`` is closed at once.
    """

    def __init__(
        self, deltas: AsyncGenerator[list[Delta], None], chunks: Chunks, *, names_events: bool = False
    ) -> None:
        self._write = _named_event if names_events else _event
        self._end = b"" if names_events else b"data: [DONE]\n\n"
        self._pieces = self._events(deltas, chunks)
        super().__init__(self._pieces, media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            async with UntilClientLeaves(receive):
                await self.stream_response(send)
        except ClientLeft:
            pass
        finally:
            await self._pieces.aclose()

    async def _events(self, deltas: AsyncGenerator[list[Delta], None], chunks: Chunks) -> AsyncGenerator[bytes, None]:
        async with aclosing(deltas):
            try:
                if opening := self._written(chunks.opening()):
                    yield opening
                async for arrived in deltas:
                    if events := b"".join([self._written(chunks.take(delta)) for delta in arrived]):
                        yield events
                yield self._written(chunks.ending()) + self._end
            except ApiError as error:
                yield self._written(chunks.failure(error))
            except Exception:
                logger.exception("a stream failed")
                yield _event(unexpected().body())

    def _written(self, chunks: Iterable[Chunk]) -> bytes:
        return b"".join([self._write(chunk) for chunk in chunks])


def _event(chunk: Chunk) -> bytes:
    return b"data: %b\n\n" % to_json(chunk)


def _named_event(chunk: Chunk) -> bytes:
    return b"event: %b\n%b" % (chunk["type"].encode(), _event(chunk))


class ClientLeft(Exception):
    """The client closed its connection before the answer was there."""


class UntilClientLeaves:
    """A context whose work is cancelled when the client leaves; then it raises ClientLeft.

    The request's body must have been read.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False

    async def __aenter__(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        self._worker = worker
        self._watch = asyncio.create_task(self._wait())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if self._has_left and self._worker.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientLeft from error

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._worker.cancel()
