"""A client that reads many streams at once with little processor time."""

from __future__ import annotations

import asyncio
import time

from servers.server import HOST

_PIECE = 2**16


class Stream:
    """The response to one request of ``/v1/completions``, on a connection of its own.

    It is parsed at its end, so that the client takes little of the measured time.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._pieces: list[bytes] = []
        self.has_begun = asyncio.Event()
        self.arrivals: list[float] = []
        """The times of the pieces with events (``time.perf_counter``)."""

    async def read(self, body: bytes) -> None:
        """Send the request, and read to the end. Raises ValueError for another status than 200."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            while piece := await reader.read(_PIECE):
                self._pieces.append(piece)
                if b"data: {" in piece:
                    self.arrivals.append(time.perf_counter())
                    self.has_begun.set()
        finally:
            self.has_begun.set()
            writer.close()
        status, _, rest = b"".join(self._pieces).partition(b"\r\n")
        if b" 200 " not in status:
            words = rest.partition(b"\r\n\r\n")[2] or rest
            raise ValueError(f"{status.decode(errors='replace')}: {words[:200].decode(errors='replace')}")

    def body(self) -> bytes:
        """The body without the sizes of its chunks, as far as it has arrived."""
        _, _, rest = b"".join(self._pieces).partition(b"\r\n\r\n")
        body = []
        while rest:
            size, separator, rest = rest.partition(b"\r\n")
            if not separator or not (count := int(size, 16)):
                break
            body.append(rest[:count])
            rest = rest[count + 2 :]
        return b"".join(body)
