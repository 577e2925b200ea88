"""The time limit of bodies: a stall of the server itself refuses none."""

from __future__ import annotations

import asyncio
import time

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from megatron_runtime.server import body_limit
from megatron_runtime.server.body_limit import BodyLimit
from megatron_runtime.server.options import HttpOptions

SECONDS = 0.2
PIECE = {"type": "http.request", "body": b"x", "more_body": True}
END = {"type": "http.request", "body": b"y", "more_body": False}


async def read_body(arrived: asyncio.Queue[Message]) -> bytes:
    """The body that an app receives behind the limit."""
    body = b""

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        nonlocal body
        while (message := await receive())["more_body"]:
            body += message["body"]
        body += message["body"]

    async def send(_: Message) -> None: ...

    limited = BodyLimit(app, HttpOptions(body_timeout=SECONDS))
    await limited({"type": "http"}, arrived.get, send)
    return body


async def test_a_body_that_arrives_during_a_stall_of_the_server_is_accepted() -> None:
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    reading = asyncio.create_task(read_body(arrived))
    arrived.put_nowait(PIECE)
    await asyncio.sleep(SECONDS / 4)
    loop = asyncio.get_running_loop()

    def stall() -> None:
        time.sleep(2 * SECONDS)
        # In its next turn the event loop reads sockets, then calls timers.
        loop.call_soon(arrived.put_nowait, END)

    loop.call_soon(stall)
    assert await reading == b"xy"


async def test_a_body_whose_pieces_arrive_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "LAST_READ_SECONDS", SECONDS)
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    reading = asyncio.create_task(read_body(arrived))
    while not reading.done():
        arrived.put_nowait(PIECE)
        await asyncio.sleep(SECONDS / 10)
    with pytest.raises(HTTPException, match="408: the body was not received within"):
        await reading
