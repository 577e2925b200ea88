"""Real servers of the tests."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megatron_runtime.server.http_server import HttpServer


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[tuple[str, int]]:
    """The address of the server on loopback, which ends with the block, whatever connections it has."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        await server.listening.wait()
        yield listening.getsockname()
        server.should_exit = server.force_exit = True
        await task
