"""Authenticates the ranks that connect to the store of a replica group.

The store of torch serves whoever reaches its port, so it listens on loopback behind a `StoreProxy`, and each rank
connects through a port of its own that `authenticated_port` opens. Both sides prove that they have the key of the
group, by an HMAC over a nonce of each side; what follows is neither encrypted nor authenticated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import secrets
import socket
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeAlias, TypeVar

NONCE_BYTES = 32
PROOF_BYTES = 32
HANDSHAKE_TIMEOUT = 10.0
"""Seconds within which a rank has to prove that it has the key."""
MAX_UNAUTHENTICATED = 256
"""Connections without a proof. A further one replaces the oldest one, so that they keep out no rank."""
LOOPBACK = "127.0.0.1"
_CHUNK = 2**16
_RANK, _STORE = b"rank", b"store"

T = TypeVar("T")
_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StoreProxy:
    """Forwards authenticated connections to a store on loopback, until this object ends.

    Args:
        listener: The listening socket of the ranks, which this object closes.
        store_port: Port of the store.
        key: Key of the replica group.
    """

    def __init__(self, listener: socket.socket, store_port: int, key: str) -> None:
        admission = _Admission(store_port, key)
        server = _run(asyncio.start_server(admission.forward, sock=listener, backlog=socket.SOMAXCONN))
        self._finalizer = weakref.finalize(self, _event_loop().call_soon_threadsafe, server.close)

    def close(self) -> None:
        """Stop listening. Established connections end with the store."""
        self._finalizer()


def authenticated_port(host: str, port: int, key: str, timeout: float) -> int:
    """A loopback port that forwards its first connection to the store behind a `StoreProxy`.

    Raises:
        OSError: The proxy doesn't accept the key, doesn't have it, or didn't answer within ``timeout`` seconds.
    """
    return _run(_open_port(host, port, key, timeout))


class _Admission:
    def __init__(self, store_port: int, key: str) -> None:
        self._store_port = store_port
        self._key = key
        self._unauthenticated: dict[asyncio.Task[Any], None] = {}

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            await self._authenticate(reader, writer)
            await _connect_streams((reader, writer), await asyncio.open_connection(LOOPBACK, self._store_port))

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises an error if the rank doesn't prove that it has the key in time."""
        task = asyncio.current_task()
        assert task is not None
        self._unauthenticated[task] = None
        try:
            if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                next(iter(self._unauthenticated)).cancel()
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                nonce = secrets.token_bytes(NONCE_BYTES)
                writer.write(nonce)
                answer = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
                nonces = nonce + answer[:NONCE_BYTES]
                if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(self._key, _RANK, nonces)):
                    raise PermissionError("a rank has another key")
                writer.write(_proof(self._key, _STORE, nonces))
        finally:
            self._unauthenticated.pop(task, None)


async def _open_port(host: str, port: int, key: str, timeout: float) -> int:
    async with asyncio.timeout(timeout):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            nonces = await reader.readexactly(NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
            writer.write(nonces[NONCE_BYTES:] + _proof(key, _RANK, nonces))
            if not hmac.compare_digest(await reader.readexactly(PROOF_BYTES), _proof(key, _STORE, nonces)):
                raise PermissionError(f"{host}:{port} has another key than this rank")
        except asyncio.IncompleteReadError:
            writer.close()
            raise PermissionError(f"{host}:{port} did not accept the key of this rank") from None
        except BaseException:
            writer.close()
            raise
    return await _forward_first_connection((reader, writer))


async def _forward_first_connection(store: _Streams) -> int:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        await _connect_streams((reader, writer), store)

    server = await asyncio.start_server(forward, LOOPBACK, 0)
    return int(server.sockets[0].getsockname()[1])


async def _connect_streams(one: _Streams, other: _Streams) -> None:
    """Forward both directions until either side ends."""
    with contextlib.closing(one[1]), contextlib.closing(other[1]):
        copies = [asyncio.create_task(_copy(one[0], other[1])), asyncio.create_task(_copy(other[0], one[1]))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for copy in copies:
                copy.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


def _proof(key: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key.encode(), b"megatron store " + side + nonces, "sha256")


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all proxies of this process. Its thread never waits for anything else."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="store-proxy", daemon=True).start()
    return loop


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop()).result()
