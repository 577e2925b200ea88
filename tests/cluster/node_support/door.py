"""Forwards connections from outside a node's network to one port inside.

Usage: `door.py PID PORT`: listens on 127.0.0.1:PORT, and connects to the same address and port in the network of the
process PID. A socket stays in the network in which it was created, so only this process connects the two. Uses only the
standard library.
"""

import asyncio
import contextlib
import ctypes
import os
import socket
import sys

LOOPBACK = "127.0.0.1"
CLONE_NEWNET = 0x40000000


def enter_network(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
    os.close(descriptor)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def serve(listener: socket.socket, port: int) -> None:
    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(LOOPBACK, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))
        inner_writer.close()
        writer.close()

    server = await asyncio.start_server(join, sock=listener)
    await server.serve_forever()


def main(pid: int, port: int) -> None:
    listener = socket.create_server((LOOPBACK, port), backlog=256)
    enter_network(pid)
    asyncio.run(serve(listener, port))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
