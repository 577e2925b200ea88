"""Work of a process beside its main work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def in_background(*works: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """The works run as tasks in this context, and are cancelled at its end. Their errors are ignored."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
