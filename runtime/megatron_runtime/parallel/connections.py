"""Sockets between the ranks of a replica group, whose addresses are in its store."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

_GREETING = struct.Struct("=16sQ")
_GREETING_SECONDS = 2.0
"""Seconds within which a rank has to authenticate after it has connected."""
_SILENCE = 10
"""Seconds without an answer from the other host's kernel after which a connection fails."""
_FIRST_PROBE, _NEXT_PROBE = 4, 2


class Listener:
    """Accepts connections of the ranks that know the secret in the store.

    Args:
        store: The store in which the address is published.
        key: The key of the address.
        address: Of this machine, as the other ranks reach it.
        timeout: Seconds within which others have to connect, and later to send expected data.
    """

    def __init__(self, store: Store, key: str, address: str, timeout: float) -> None:
        self._timeout = timeout
        self._token = secrets.token_hex(8)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family)
        store.set(_key(key), f"{address} {self._server.getsockname()[1]} {self._token}")

    def accept(self, count: int) -> dict[int, socket.socket]:
        """Accept connections of ``count`` other ranks, by rank, and close the listener. Raises OSError if some are
        missing.
        """
        deadline = time.monotonic() + self._timeout
        found: dict[int, socket.socket] = {}
        with self._server:
            while len(found) < count:
                self._server.settimeout(max(deadline - time.monotonic(), 0.001))
                end, _ = self._server.accept()
                rank = self._greeted_by(end)
                if rank is None:
                    end.close()
                    continue
                end.settimeout(self._timeout)
                found[rank] = _without_delay(end)
        return found

    def _greeted_by(self, end: socket.socket) -> int | None:
        """The rank of the peer; None for a peer without the secret, which may send nothing or disconnect."""
        end.settimeout(_GREETING_SECONDS)
        try:
            token, rank = _GREETING.unpack(read(end, _GREETING.size))
        except OSError:
            return None
        return int(rank) if secrets.compare_digest(token, self._token.encode()) else None


def connect(store: Store, key: str, rank: int, timeout: float) -> socket.socket:
    """Connect to the listener of this key as ``rank``. Raises OSError or RuntimeError after the timeout."""
    store.wait([_key(key)], timedelta(seconds=timeout))
    address, port, token = store.get(_key(key)).decode().split()
    end = socket.create_connection((address, int(port)), timeout)
    end.sendall(_GREETING.pack(token.encode(), rank))
    return _without_delay(end)


def break_when_silent(end: socket.socket) -> None:
    """Make an idle or waiting connection fail when the other host is unreachable, which a cut network does not signal.

    Not for connections whose peer may leave data unread for a long time: these would fail too.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _FIRST_PROBE)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _NEXT_PROBE)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (_SILENCE - _FIRST_PROBE) // _NEXT_PROBE)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE)


def read(end: socket.socket, size: int) -> bytes:
    """Receive this number of bytes. Raises OSError if the connection ends before, or after its timeout."""
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        done += received(end.recv_into(view[done:]))
    return bytes(content)


def received(count: int) -> int:
    """The received bytes. Raises ConnectionResetError for the end of the stream."""
    if count == 0:
        raise ConnectionResetError("the connection was closed")
    return count


def _key(key: str) -> str:
    return f"listener/{key}"


def _without_delay(end: socket.socket) -> socket.socket:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end
