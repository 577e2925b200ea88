"""Memory of a load returns to the system when the load is over."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from runtime_support.resident_memory import addresses, freed_between_blocks_in_use, resident_share

from megatron_runtime.notifier import Notifier
from megatron_runtime.processes import idle_memory
from megatron_runtime.processes.allocator import return_freed_memory
from megatron_runtime.processes.idle_memory import GROWTH_BYTES, SAMPLES, return_memory_at_rest

BLOCK = 100_000
BLOCKS = 10 * GROWTH_BYTES // BLOCK


class Load:
    """Whether there is a load."""

    def __init__(self) -> None:
        self.is_there = False
        self._asked = 0
        self._next = Notifier()

    def __call__(self) -> bool:
        self._asked += 1
        self._next.notify()
        return self.is_there

    async def wait_for_rests(self) -> None:
        """Returns after the time in which memory is returned without a load, several times."""
        end = self._asked + 3 * SAMPLES
        while self._asked < end:
            await self._next.wait()


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """One item for each time that memory was returned; this begins and ends without freed memory."""
    times: list[bool] = []

    def return_and_note() -> None:
        return_freed_memory()
        times.append(True)

    monkeypatch.setattr(idle_memory, "return_freed_memory", return_and_note)
    monkeypatch.setattr(idle_memory, "REST_SECONDS", 0.05)
    gc.collect()
    return_freed_memory()
    yield times
    return_freed_memory()


@asynccontextmanager
async def returning(load: Load) -> AsyncIterator[None]:
    """Memory is returned in this context."""
    task = asyncio.create_task(return_memory_at_rest(load))
    await load.wait_for_rests()
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_memory_is_returned_once_when_the_load_is_over(returned: list[bool]) -> None:
    load = Load()
    async with returning(load):
        load.is_there = True
        kept, freed = freed_between_blocks_in_use(BLOCKS, BLOCK)
        await load.wait_for_rests()
        assert not returned
        assert resident_share(freed) > 0.9
        load.is_there = False
        await load.wait_for_rests()
    assert len(returned) == 1
    assert resident_share(freed) < 0.1
    assert resident_share(map(addresses, kept)) == 1


async def test_a_process_that_has_not_grown_keeps_its_freed_memory(returned: list[bool]) -> None:
    load = Load()
    _, freed = freed_between_blocks_in_use(BLOCKS, BLOCK)
    async with returning(load):
        await load.wait_for_rests()
    assert not returned
    assert resident_share(freed) > 0.9
