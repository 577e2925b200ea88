"""Wakes all tasks that wait for a change."""

from __future__ import annotations

import asyncio


class Notifier:
    """Wakes the tasks that wait when it notifies; a task that waits later gets the next notification."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiting tasks."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next `notify`. Check the condition before, without an await in between."""
        await self._next.wait()
