"""The adapters that a coordinator assigns to an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from megatron_runtime.engine.worker.protocol import WeightEngine
from megatron_runtime.errors import CheckpointError
from megatron_runtime.wire.items import AdapterEntry, AdapterReport


class AdapterAssignments:
    """The last assignment, which the engine reports whenever it registers.

    Args:
        engine: The engine that loads the adapters.
        in_thread: Runs a function in the thread that steps the engine.
        report: Sends a version, and why the engine does not have it, or an empty text.
    """

    def __init__(
        self,
        engine: WeightEngine,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        report: Callable[[int, str], None],
    ) -> None:
        self._engine = engine
        self._in_thread = in_thread
        self._report = report
        self._version = 0
        self._entries: Sequence[AdapterEntry] = ()

    def describe(self) -> AdapterReport:
        """The adapters of the engine."""
        own = tuple(AdapterEntry(name, path, 0) for name, path in self._engine.own_adapters)
        return AdapterReport(self._version, self._entries, own)

    async def apply(self, version: int, entries: Sequence[AdapterEntry]) -> None:
        """Load and unload adapters between two steps. On an error the engine keeps the present ones."""
        error = ""
        if version != self._version:  # else it was sent again because its answer was late
            try:
                await self._in_thread(partial(self._engine.assign_adapters, entries))
            except CheckpointError as failure:
                error = str(failure)
            else:
                self._version, self._entries = version, entries
        self._report(version, error)
