"""The limit of all bodies together, with a real server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI, Request
from runtime_support.http_servers import serving
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.server.body_limit import BodyLimit
from megatron_runtime.server.errors import install_error_handlers
from megatron_runtime.server.held_bodies import HeldBodies
from megatron_runtime.server.http_server import HttpServer
from megatron_runtime.server.large_bodies import LARGE_BODY_BYTES
from megatron_runtime.server.options import HttpOptions

LARGEST = 2**20
MOST = 900_000
"""Of a body: more than the half of an address allows twice, and than all may hold three times."""


class Server:
    """An app that counts the bytes of the bodies that it receives, and its address."""

    def __init__(self) -> None:
        self.app = FastAPI()
        install_error_handlers(self.app, {})
        options = HttpOptions(max_body_bytes=LARGEST, max_total_body_bytes=2 * LARGEST)
        self.app.add_middleware(BodyLimit, options=options)
        self.app.add_middleware(self._around)
        self.address = ("", 0)
        self.running = 0
        self.received = 0
        self.changed = asyncio.Condition()

        @self.app.post("/")
        async def size(request: Request) -> int:
            body = 0
            async for part in request.stream():
                body += len(part)
                self.received += len(part)
                await self._notify()
            return body

    def _around(self, app: ASGIApp) -> ASGIApp:
        """Counts the requests that the limit has not released yet."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            self.running += scope["type"] == "http"
            try:
                await app(scope, receive, send)
            finally:
                self.running -= scope["type"] == "http"
                await self._notify()

        return counted

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    @asynccontextmanager
    async def unfinished(self, source: str) -> AsyncIterator[asyncio.StreamWriter]:
        """A connection from this address with a body of ``MOST`` bytes but the last, all of which have arrived."""
        _, writer = await self._connect(source)
        expected = self.received + MOST - 1
        writer.write(head(MOST) + bytes(MOST - 1))
        await self.until(lambda: self.received >= expected)
        try:
            yield writer
        finally:
            writer.close()
            await writer.wait_closed()

    async def ask(self, source: str, size: int, *, sent: int | None = None) -> tuple[int, dict[str, str], Any]:
        """Status, headers and content of the answer to a body, or to its first bytes if it is refused by then.

        No byte follows the one that it is refused for: the server would reset the connection.
        """
        reader, writer = await self._connect(source)
        try:
            writer.write(head(size) + bytes(size if sent is None else sent))
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            content = await reader.readexactly(int(headers["content-length"]))
            return int(first.split()[1]), headers, json.loads(content)
        finally:
            writer.close()
            await writer.wait_closed()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once the condition holds."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _connect(self, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address, local_addr=(source, 0))


def head(size: int) -> bytes:
    return f"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {size}\r\n\r\n".encode()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """It runs until the end of the test."""
    found = Server()
    async with serving(HttpServer(found.app)) as found.address:
        yield found


async def test_unfinished_bodies_of_one_address_have_a_limit(server: Server) -> None:
    async with server.unfinished("127.0.0.1"):
        status, headers, content = await server.ask("127.0.0.1", MOST, sent=LARGEST - MOST + 2)
        assert (status, headers["retry-after"], headers["connection"]) == (429, "5", "close")
        assert content["error"]["type"] == "rate_limit_error"
        assert "the bodies of your requests in progress have more than 1048576 bytes" in content["error"]["message"]
        assert (await server.ask("127.0.0.2", MOST))[::2] == (200, MOST)
        assert (await server.ask("127.0.0.1", LARGE_BODY_BYTES))[::2] == (200, LARGE_BODY_BYTES)


async def test_unfinished_bodies_of_all_addresses_have_a_limit_that_small_bodies_pass(server: Server) -> None:
    async with server.unfinished("127.0.0.1") as kept:
        async with server.unfinished("127.0.0.2"):
            status, headers, content = await server.ask("127.0.0.3", MOST, sent=2 * (LARGEST - MOST + 1) + 1)
            assert (status, headers["retry-after"], headers["connection"]) == (503, "5", "close")
            assert content["error"]["type"] == "service_unavailable_error"
            assert "of all requests in progress have more than 2097152 bytes" in content["error"]["message"]
            for number in (1, 2, 3):
                assert (await server.ask(f"127.0.0.{number}", LARGE_BODY_BYTES))[::2] == (200, LARGE_BODY_BYTES)
        await server.until(lambda: server.running == 1)
        assert (await server.ask("127.0.0.3", MOST))[::2] == (200, MOST)
        kept.write(b"x")
        await server.until(lambda: server.running == 0)
        assert (await server.ask("127.0.0.1", MOST))[::2] == (200, MOST)


async def test_refused_and_finished_bodies_are_not_counted_any_more(server: Server) -> None:
    for size, expected in ((MOST, 200), (LARGEST + 1, 413)) * 4:
        assert (await server.ask("127.0.0.1", size))[0] == expected
        await server.until(lambda: server.running == 0)


def test_a_body_is_counted_from_its_first_byte_to_the_end_of_its_request() -> None:
    held = HeldBodies(100, 10)
    first, second = held.body("a"), held.body("b")
    first.add(30)
    first.add(20)
    second.add(40)
    assert (held.total, dict(held.by_address)) == (90, {"a": 50, "b": 40})
    first.release()
    first.release()
    second.release()
    assert (held.total, dict(held.by_address)) == (0, {})


def test_an_address_may_hold_the_largest_body() -> None:
    assert HeldBodies(limit=100, largest=80).share == 80
    assert HeldBodies(limit=100, largest=20).share == 50


def test_a_limit_below_that_of_one_body_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--max-total-body: 10 bytes are less than --max-body \(16777216 "):
        HttpOptions(max_total_body_bytes=10).check()
