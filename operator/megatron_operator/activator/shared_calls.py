"""Calls that many requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class SharedCalls(Generic[Result]):
    """One call at a time for each key. Callers that come meanwhile get its result or error; any of them may leave."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: dict[Hashable, asyncio.Task[Result]] = {}

    async def get(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of the call for this key that is in flight, or else of ``call``."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(call(), name=f"{self._name} {key}")
            task.add_done_callback(lambda done: self._end(key, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the calls in flight."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, key: Hashable, task: asyncio.Task[Result]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # Its callers may all have left.
