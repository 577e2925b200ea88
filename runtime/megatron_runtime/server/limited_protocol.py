"""HTTP/1.1 with limits on the head of a request and on connections, which uvicorn does not have with httptools."""

from __future__ import annotations

import asyncio
import http
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers."""
HEAD_SECONDS = 30.0
"""Time for the head of a request to arrive."""
MAX_CONNECTIONS = 4096
"""Connections of a process, or half of the files that it may open if that is less."""


class LimitedProtocol(HttpToolsProtocol):
    """Ends connections beyond the limits; half of the connections may come from one address."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes: int | None = 0
        """Received bytes of the current head; None while a body is received."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection at once if there are too many."""
        super().connection_made(transport)
        limit = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        if len(self.connections) > limit or self._count_of_address() > limit // 2:
            self._refuse(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; close some")
        else:
            self._start_timer()

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

    def on_message_complete(self) -> None:
        """The next head may follow."""
        self._head_bytes = 0
        super().on_message_complete()

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
