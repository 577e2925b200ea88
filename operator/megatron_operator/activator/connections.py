"""Limits of connections: how many there are, and how long the head of a request may take.

aiohttp's server has neither limit, and begins to time a connection only after its first request.
"""

from __future__ import annotations

import asyncio
import http
import resource
from collections import Counter
from collections.abc import Awaitable, Callable

from aiohttp import web

from megatron_operator.activator.limits import Limits

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connections:
    """The connections of an activator."""

    def __init__(self, limits: Limits) -> None:
        self.head_timeout = limits.head_timeout
        # Each request needs a connection to its model, too.
        self._limit = min(limits.connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._limit_of_address = limits.share_of(self._limit)
        self._open: dict[asyncio.BaseProtocol, LimitedConnection] = {}
        """By aiohttp's protocol."""
        self._addresses = Counter[str]()

    def protocol(self, served: asyncio.Protocol) -> LimitedConnection:
        """The protocol of a new connection, which ``served`` serves within the limits."""
        return LimitedConnection(served, self)

    def add(self, connection: LimitedConnection) -> str:
        """Count a connection. Returns why it is refused, or nothing."""
        if len(self._open) >= self._limit:
            return f"too many connections to this activator: it serves {self._limit} at a time"
        if self._addresses[connection.address] >= self._limit_of_address:
            return f"too many connections from {connection.address}: close some of the {self._limit_of_address}"
        self._open[connection.served] = connection
        self._addresses[connection.address] += 1
        return ""

    def remove(self, connection: LimitedConnection) -> None:
        """Forget a connection, also one that was refused."""
        if self._open.pop(connection.served, None) is not None:
            self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """No head is awaited on a connection while it has a request."""
        connection = self._open.get(request.protocol)
        if connection is not None:
            connection.begin_request()
        try:
            return await handler(request)
        finally:
            if connection is not None:
                connection.end_request()


class LimitedConnection(asyncio.Protocol):
    """Passes on what a connection receives to the protocol that serves it."""

    def __init__(self, served: asyncio.Protocol, connections: Connections) -> None:
        self.served = served
        self.address = ""
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        """None for a connection that is refused."""
        self._timer: asyncio.TimerHandle | None = None
        self._has_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse the connection if there are too many, or else wait for a head."""
        assert isinstance(transport, asyncio.Transport)
        self.address = address_of(transport)
        if refusal := self._connections.add(self):
            _refuse(transport, http.HTTPStatus.SERVICE_UNAVAILABLE, refusal)
            return
        self._transport = transport
        self.served.connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        self._stop_timer()
        self._connections.remove(self)
        if self._transport is not None:
            self.served.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Data between two requests belong to a head."""
        if self._transport is None or self._transport.is_closing():
            return
        if not self._has_request:
            self._start_timer()
        self.served.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends nothing more."""
        return self.served.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.served.pause_writing()

    def resume_writing(self) -> None:
        """The client has read enough."""
        self.served.resume_writing()

    def begin_request(self) -> None:
        """A head is complete."""
        self._has_request = True
        self._stop_timer()

    def end_request(self) -> None:
        """The answer was sent; another head may follow."""
        self._has_request = False

    def _start_timer(self) -> None:
        if self._timer is None:
            timeout = self._connections.head_timeout
            self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        assert self._transport is not None
        words = f"the head of a request was not received within {self._connections.head_timeout:g} s"
        _refuse(self._transport, http.HTTPStatus.REQUEST_TIMEOUT, words)


def address_of(transport: asyncio.BaseTransport | None) -> str:
    """The client's IP address; empty for a connection that has ended."""
    peer = transport.get_extra_info("peername") if transport is not None else None
    return str(peer[0]) if peer else ""


def _refuse(transport: asyncio.Transport, status: http.HTTPStatus, words: str) -> None:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
    )
    transport.write(f"{head}Content-Length: {len(words)}\r\n\r\n{words}".encode())
    transport.close()
