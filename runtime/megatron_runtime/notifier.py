"""Notifies tasks of changes, like a condition variable without a lock."""

from __future__ import annotations

import asyncio


class Notifier:
    """Wakes all waiting tasks with each notification; a task that waits later gets the next one."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wakes all tasks that wait now."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Returns at the next ``notify``. Check the condition before the call, without an await in between."""
        await self._next.wait()
