"""Server-sent events, and the end of work for clients that have left."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_runtime.server.errors import ApiError, unexpected

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies must pass each event on at once."""

_written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Made once: ``json.dumps`` would make one for each chunk."""


class EventStream(StreamingResponse):
    """``text/event-stream`` of JSON chunks that ends with ``[DONE]``, or with an error in OpenAI's shape.

    With ``names_events`` each chunk is an event named by its ``type``, and the last one says itself that it is over.
    When the client leaves, the generator of the chunks is closed at once.
    """

    def __init__(self, chunks: AsyncGenerator[Mapping[str, Any], None], *, names_events: bool = False) -> None:
        self._chunks = chunks
        super().__init__(_events(chunks, names_events), media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()


async def _events(chunks: AsyncGenerator[Mapping[str, Any], None], names_events: bool) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            name = f"event: {chunk['type']}\n".encode() if names_events else b""
            yield name + _event(_written(chunk))
    except ApiError as error:
        yield _event(json.dumps(error.body()))
        return
    except Exception:
        logger.exception("a stream failed")
        yield _event(json.dumps(unexpected().body()))
        return
    if not names_events:
        yield _event("[DONE]")


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


class ClientLeft(Exception):
    """The client closed its connection before the answer was there."""


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves; then raises ClientLeft.

    The body of ``request`` must have been read.
    """
    job = asyncio.create_task(work)
    departure = asyncio.create_task(_departure(request))
    try:
        await asyncio.wait({job, departure}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientLeft
        return job.result()
    finally:
        for task in (job, departure):
            task.cancel()
        await asyncio.gather(job, departure, return_exceptions=True)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
