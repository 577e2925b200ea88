"""HTTP/1.1 with limits on the head of a request and on connections, and a shutdown that loses no request.

Uvicorn has no such limits with httptools, and closes idle connections when it shuts down: a request that a client sends
at this moment is lost.
"""

from __future__ import annotations

import asyncio
import http
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers."""
HEAD_SECONDS = 30.0
"""Time for the head of a request to arrive."""
MAX_CONNECTIONS = 4096
"""Connections of a process, or half of the files that it may open if that is less."""
LAST_IDLE_SECONDS = 6
"""Time after which a connection without a request is closed while the server hands over. Longer than clients keep an
idle connection: httpx 5 s, Node.js 4 s."""


class ConnectionsState(ServerState):
    """What the connections of a server share.

    With ``hands_over``, a shutdown announces the end of each connection in its next response, and closes it before only
    if it is idle for ``LAST_IDLE_SECONDS``.
    """

    hands_over = False
    is_shutting_down = False
    """Uvicorn ends the connections that it knows when the shutdown begins. One whose protocol gets it later, such as
    after a TLS handshake, ends by itself."""


class LimitedProtocol(HttpToolsProtocol):
    """Ends connections beyond the limits; half of the connections may come from one address."""

    server_state: ConnectionsState

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes: int | None = 0
        """Received bytes of the current head; None while a body is received."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_ending = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection at once if there are too many; end it if the server shuts down."""
        super().connection_made(transport)
        limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        if len(self.connections) > limit or self._count_of_address() > limit // 2:
            self._refuse(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; close some")
            return
        self._start_timer()
        if self.server_state.is_shutting_down:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuse a head that is too large."""
        if self.transport.is_closing():
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD_BYTES:
            status = http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._refuse(status, f"the request line and the headers have more than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        """The end of a head."""
        self._head_bytes = None
        self._stop_timer()
        super().on_headers_complete()
        if self._is_ending and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """The next head may follow."""
        self._head_bytes = 0
        super().on_message_complete()

    def shutdown(self) -> None:
        """End the connection: at once if it is idle, or as ``ConnectionsState`` describes."""
        if not self.server_state.hands_over:
            super().shutdown()
        elif not self._is_ending:
            self._is_ending = True
            self.timeout_keep_alive = LAST_IDLE_SECONDS
            if self.cycle is not None and not self.cycle.response_started:
                self.cycle.keep_alive = False
            elif self.cycle is None or self.cycle.response_complete:
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(LAST_IDLE_SECONDS, self.timeout_keep_alive_handler)

    def _count_of_address(self) -> int:
        addresses = (getattr(each, "client", None) for each in self.connections)
        mine = self.client[0] if self.client else None
        return sum(address is not None and address[0] == mine for address in addresses)

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._time_out)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out(self) -> None:
        self._refuse(http.HTTPStatus.REQUEST_TIMEOUT, f"the headers were not received within {HEAD_SECONDS:g} seconds")

    def _refuse(self, status: http.HTTPStatus, message: str) -> None:
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # A pipelined request: the answer to the one before it is being written.
            return
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        self.transport.write(f"{head}content-length: {len(message)}\r\nconnection: close\r\n\r\n{message}".encode())
        self.transport.close()
