"""Server-sent events, and cancellation when the client disconnects."""

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
"""Disable buffering in proxies."""

Chunk = Mapping[str, Any]


class ChunkWriter(Protocol):
    """Formats the chunks of one stream."""

    def opening(self) -> Iterable[Chunk]:
        """Chunks before the first delta."""
        ...

    def delta(self, delta: Delta) -> Iterable[Chunk]:
        """Chunks for a delta."""
        ...

    def ending(self) -> Iterable[Chunk]:
        """Chunks after the last delta."""
        ...

    def failure(self, error: ApiError) -> Iterable[Chunk]:
        """Chunks after an error."""
        ...


class EventStream(StreamingResponse):
    """``text/event-stream`` of JSON chunks that ends with ``[DONE]``, or with an error in OpenAI's format.

    Deltas that arrive together are sent together. With ``names_events`` each chunk is an event named by its ``type``,
    and there is no ``[DONE]``. ``deltas`` is closed as soon as the client disconnects.
    """

    def __init__(
        self, deltas: AsyncGenerator[list[Delta], None], chunks: ChunkWriter, *, names_events: bool = False
    ) -> None:
        self._write = _named_event if names_events else _event
        self._end = b"" if names_events else b"data: [DONE]\n\n"
        self._pieces = self._events(deltas, chunks)
        super().__init__(self._pieces, media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            async with CancelOnDisconnect(receive):
                await self.stream_response(send)
        except ClientDisconnected:
            pass
        finally:
            await self._pieces.aclose()

    async def _events(
        self, deltas: AsyncGenerator[list[Delta], None], chunks: ChunkWriter
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(deltas):
            try:
                if opening := self._written(chunks.opening()):
                    yield opening
                async for arrived in deltas:
                    if events := b"".join([self._written(chunks.delta(delta)) for delta in arrived]):
                        yield events
                yield self._written(chunks.ending()) + self._end
            except ApiError as error:
                yield self._written(chunks.failure(error))
            except Exception:
                logger.exception("a stream failed")
                yield self._written(chunks.failure(unexpected()))

    def _written(self, chunks: Iterable[Chunk]) -> bytes:
        return b"".join([self._write(chunk) for chunk in chunks])


def _event(chunk: Chunk) -> bytes:
    return b"data: %b\n\n" % to_json(chunk)


def _named_event(chunk: Chunk) -> bytes:
    return b"event: %b\n%b" % (chunk["type"].encode(), _event(chunk))


class ClientDisconnected(Exception):
    """The client closed its connection before the answer was complete."""


class CancelOnDisconnect:
    """A context that cancels its body when the client disconnects, and then raises ClientDisconnected.

    The request's body must have been read before.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_disconnected = False

    async def __aenter__(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        self._worker = worker
        self._watch = asyncio.create_task(self._wait())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if self._is_disconnected and self._worker.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientDisconnected from error

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_disconnected = True
        self._worker.cancel()
