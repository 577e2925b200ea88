"""Works on large request bodies outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LARGE_BODY_BYTES = 32 * 1024
"""Above this size, the work on a body takes longer than its way to a thread and back."""

P = ParamSpec("P")
T = TypeVar("T")


class LargeBodies:
    """Parses, validates and tokenizes large bodies in one thread, one after the other.

    Small requests are served meanwhile, and the memory that the work takes is that of one body.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-bodies")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``work`` for a body of ``size`` bytes; small ones are worked on at once."""
        if size <= LARGE_BODY_BYTES:
            return work(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))
