"""The memory of large requests returns to the system after they have ended."""

from __future__ import annotations

import asyncio
import gc

import pytest
from runtime_support.resident_memory import resident_bytes
from starlette.types import Message, Receive, Scope, Send

from megatron_runtime.processes.allocator import return_freed_memory
from megatron_runtime.server import freed_memory
from megatron_runtime.server.body_limit import BodyLimit
from megatron_runtime.server.freed_memory import LARGE_REQUEST_BYTES, FreedMemory
from megatron_runtime.server.options import HttpOptions

BLOCKS, BLOCK = 2000, 100_000
SCOPE = {"type": "http"}


async def send(_: Message) -> None: ...


def receive_all(size: int) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(size), "more_body": False}

    return receive


class Returns:
    """Calls of the function that returns memory."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()

    def __call__(self) -> None:
        return_freed_memory()
        self.count += 1
        self._loop.call_soon_threadsafe(self._done.set)

    async def wait(self) -> None:
        """Returns after the next one."""
        await self._done.wait()
        self._done.clear()


@pytest.fixture
async def returns(monkeypatch: pytest.MonkeyPatch) -> Returns:
    found = Returns()
    monkeypatch.setattr(freed_memory, "return_freed_memory", found)
    monkeypatch.setattr(freed_memory, "RETURN_SECONDS", 0.0)
    return found


async def test_memory_between_blocks_in_use_is_returned(returns: Returns) -> None:
    kept: list[bytearray] = []

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        blocks = [bytearray(BLOCK) for _ in range(BLOCKS)]
        kept.extend(blocks[::2])

    gc.collect()
    return_freed_memory()
    before = resident_bytes()
    limited = BodyLimit(app, HttpOptions())
    await limited(SCOPE, receive_all(LARGE_REQUEST_BYTES), send)
    assert resident_bytes() - before > 0.9 * BLOCKS * BLOCK  # the C library keeps what is not at the end
    await returns.wait()
    assert resident_bytes() - before < 1.2 * len(kept) * BLOCK


async def test_it_is_returned_once_for_many_requests(returns: Returns) -> None:
    freed = FreedMemory()
    for number in (1, 2):
        for size in (LARGE_REQUEST_BYTES, 10, 2 * LARGE_REQUEST_BYTES):
            freed.request_ended(size)
        await returns.wait()
        assert returns.count == number
    freed.request_ended(LARGE_REQUEST_BYTES - 1)
    assert freed._timer is None
