"""Limits on heads and connections, with a real server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from runtime_support.http_servers import serving

from megatron_runtime.server import limited_protocol
from megatron_runtime.server.http_server import HttpServer
from megatron_runtime.server.limited_protocol import LimitedProtocol

REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.fixture
def server() -> HttpServer:
    """A server that answers with the size of the body."""
    app = FastAPI()

    @app.api_route("/", methods=["GET", "POST"])
    async def size(request: Request) -> int:
        return len(await request.body())

    return HttpServer(app)


@pytest.fixture
async def address(server: HttpServer) -> AsyncIterator[tuple[str, int]]:
    """Of the server, which runs."""
    async with serving(server) as found:
        yield found


async def ask(address: tuple[str, int], *parts: bytes) -> bytes:
    """All that the server sends until it closes the connection or has answered."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            return await reader.read(65536)
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nlong: ", b"GET /?", b"GET / HTTP/1.1\r\n"],
    ids=["header", "url", "many headers"],
)
async def test_an_endless_head_is_refused(address: tuple[str, int], head: bytes) -> None:
    filling = b"a: b\r\n" * 1000 if head.endswith(b"\n") else b"x" * 6000
    answer = await ask(address, head, *[filling] * 200)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert (await ask(address, REQUEST)).startswith(b"HTTP/1.1 200 ")


async def test_a_large_head_within_the_limit_and_a_large_body_are_accepted(address: tuple[str, int]) -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\nlong: " + b"x" * 60_000 + b"\r\n\r\n"
    answer = await ask(address, head, b"x" * 1_000_000)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"1000000")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost:", REQUEST + b"GET / HT"])
async def test_a_head_that_does_not_arrive_ends_the_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(limited_protocol, "HEAD_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    received = await asyncio.wait_for(reader.read(), 20)
    assert b"HTTP/1.1 408 " in received
    assert (b"HTTP/1.1 200 " in received) == sent.startswith(REQUEST)
    writer.close()


async def test_connections_beyond_the_limit_are_closed_and_the_others_serve_on(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_protocol, "MAX_CONNECTIONS", 6)
    opened = [await asyncio.open_connection(*address) for _ in range(3)]  # half of them may have one address
    assert (await ask(address)).startswith(b"HTTP/1.1 503 ")
    for reader, writer in opened:
        writer.write(REQUEST)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    for _ in range(100):
        if (answer := await ask(address, REQUEST)).startswith(b"HTTP/1.1 200 "):
            break
        await asyncio.sleep(0.05)
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("hands_over", [False, True])
async def test_a_connection_that_is_accepted_while_the_server_shuts_down_ends_like_the_others(
    server: HttpServer, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, hands_over: bool
) -> None:
    """Its protocol is made before the shutdown, and gets the connection afterwards."""
    server.server_state.hands_over = hands_over
    make, stops = LimitedProtocol.__init__, []

    def make_and_shut_down(self: LimitedProtocol, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        stops.append(asyncio.create_task(server.shutdown()))

    monkeypatch.setattr(LimitedProtocol, "__init__", make_and_shut_down)
    answer = await asyncio.wait_for(ask(address, REQUEST), 20)
    if hands_over:
        assert b"connection: close" in answer
    else:
        assert answer == b""
    await asyncio.gather(*stops)
