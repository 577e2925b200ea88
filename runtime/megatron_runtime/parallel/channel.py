"""Messages from one rank to all others of its replica, in order.

Over sockets of our own: gloo's thread and the one that receives meet at a lock, and where every core computes, each
message costs the processor some milliseconds.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_runtime.parallel.layout import RankPosition

_HEADER = struct.Struct("=QQ")
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Message:
    """What came, and the number that was sent with it."""

    body: bytes
    checksum: int


class Channel:
    """One rank sends, all others receive. What the system's buffers hold is sent without waiting for the receivers.

    Opened on all ranks at once; OSError or RuntimeError when they don't come together, later when one is gone or later
    than the timeout.

    Args:
        store: Where the sender leaves its address.
        name: Of this channel.
        position: Who this is.
        source: The rank that sends.
        address: Of this machine, as the other ranks see it.
        timeout: Seconds that another rank may take.
    """

    def __init__(
        self, store: Store, name: str, position: RankPosition, *, source: int, address: str, timeout: float
    ) -> None:
        self._timeout = timeout
        self._ends: list[socket.socket] = []
        key = f"channel/{name}"
        if position.rank == source:
            self._accept(store, key, address, position.sizes.ranks_per_replica - 1)
        else:
            self._connect(store, key)

    def send(self, body: bytes, checksum: int = 0) -> None:
        """Send to all others."""
        message = _HEADER.pack(len(body), checksum) + body
        for end in self._ends:
            end.sendall(message)

    def receive(self) -> Message:
        """The next message."""
        length, checksum = _HEADER.unpack(_read(self._ends[0], _HEADER.size))
        return Message(_read(self._ends[0], length), checksum)

    def close(self) -> None:
        """What was sent still arrives."""
        for end in self._ends:
            end.close()

    def _accept(self, store: Store, key: str, address: str, others: int) -> None:
        token, deadline = secrets.token_hex(_TOKEN_BYTES // 2), time.monotonic() + self._timeout
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=others) as server:
            store.set(key, f"{address} {server.getsockname()[1]} {token}")
            while len(self._ends) < others:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                end, _ = server.accept()
                end.settimeout(self._timeout)
                if _read(end, _TOKEN_BYTES) == token.encode():
                    self._keep(end)
                else:
                    end.close()

    def _connect(self, store: Store, key: str) -> None:
        store.wait([key], timedelta(seconds=self._timeout))
        address, port, token = store.get(key).decode().split()
        end = socket.create_connection((address, int(port)), self._timeout)
        end.sendall(token.encode())
        self._keep(end)

    def _keep(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ends.append(end)


def _read(end: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = end.recv_into(view[done:])
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        done += count
    return bytes(content)
