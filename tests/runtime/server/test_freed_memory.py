"""The memory of large requests returns to the system after they have ended."""

from __future__ import annotations

import asyncio
import gc

import pytest
from runtime_support.resident_memory import addresses, freed_between_blocks_in_use, resident_share
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
    freed: list[range] = []

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        in_use, between = freed_between_blocks_in_use(BLOCKS, BLOCK)
        kept.extend(in_use)
        freed.extend(between)

    gc.collect()
    return_freed_memory()
    limited = BodyLimit(app, HttpOptions())
    await limited(SCOPE, receive_all(LARGE_REQUEST_BYTES), send)
    assert resident_share(freed) > 0.9
    await returns.wait()
    assert resident_share(freed) < 0.1
    assert resident_share(map(addresses, kept)) == 1


async def test_it_is_returned_once_for_many_requests(returns: Returns) -> None:
    freed = FreedMemory()
    for number in (1, 2):
        for size in (LARGE_REQUEST_BYTES, 10, 2 * LARGE_REQUEST_BYTES):
            freed.request_ended(size)
        await returns.wait()
        assert returns.count == number
    freed.request_ended(LARGE_REQUEST_BYTES - 1)
    assert freed._timer is None
