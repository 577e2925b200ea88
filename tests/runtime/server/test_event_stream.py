"""Server-sent events: batching, errors, and a client that disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import pytest

from megatron_runtime.server.errors import ApiError, too_late
from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.openai.streaming import EventStream

Batches = AsyncGenerator[list[Delta], None]


class Texts:
    """Chunks that are the text of each delta."""

    def opening(self) -> Iterable[dict[str, Any]]:
        return [{"type": "begin"}]

    def delta(self, delta: Delta) -> Iterable[dict[str, Any]]:
        return [{"type": "text", "text": delta.text}] if delta.text else []

    def ending(self) -> Iterable[dict[str, Any]]:
        return [{"type": "end"}]

    def failure(self, error: ApiError) -> Iterable[dict[str, Any]]:
        return [{"type": error.kind, "code": error.code}]


async def deltas_of(*batches: list[str], error: Exception | None = None) -> Batches:
    for batch in batches:
        yield [Delta(0, text) for text in batch]
    if error is not None:
        raise error


async def sent(deltas: Batches, **options: Any) -> list[bytes]:
    """The bodies that a client receives."""
    bodies = []

    async def send(message: Any) -> None:
        if message.get("body"):
            bodies.append(message["body"])

    await EventStream(deltas, Texts(), **options)({}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    return bodies


async def test_deltas_that_arrive_together_are_sent_together() -> None:
    bodies = await sent(deltas_of(["a"], ["b", "", "c"], [""]))
    assert bodies == [
        b'data: {"type":"begin"}\n\n',
        b'data: {"type":"text","text":"a"}\n\n',
        b'data: {"type":"text","text":"b"}\n\ndata: {"type":"text","text":"c"}\n\n',
        b'data: {"type":"end"}\n\ndata: [DONE]\n\n',
    ]


async def test_named_events_have_the_type_of_their_chunk_and_no_done_marker() -> None:
    bodies = await sent(deltas_of(["a"]), names_events=True)
    assert bodies[1:] == [
        b'event: text\ndata: {"type":"text","text":"a"}\n\n',
        b'event: end\ndata: {"type":"end"}\n\n',
    ]


@pytest.mark.parametrize(
    ("error", "last"),
    [(too_late("too late"), b'"code":"deadline_exceeded"'), (RuntimeError("broken"), b'"type":"server_error"')],
)
async def test_an_error_ends_a_stream_after_the_earlier_chunks(error: Exception, last: bytes) -> None:
    *before, end = await sent(deltas_of(["a"], error=error))
    assert len(before) == 2
    assert last in end


async def test_a_client_that_disconnects_closes_the_source_of_the_deltas() -> None:
    has_begun, is_closed = asyncio.Event(), asyncio.Event()

    async def endless() -> Batches:
        try:
            has_begun.set()
            await asyncio.Event().wait()
            yield []
        finally:
            is_closed.set()

    async def receive() -> dict[str, Any]:
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        return

    await EventStream(endless(), Texts())({}, receive, send)
    assert is_closed.is_set()
