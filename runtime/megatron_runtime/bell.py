"""A signal to all who wait for something to change."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes whoever waits when it rings; who comes later waits for the next time."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ring(self) -> None:
        """Something has changed."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Until it rings. Look at what you wait for before, without awaiting anything in between."""
        await self._next.wait()
