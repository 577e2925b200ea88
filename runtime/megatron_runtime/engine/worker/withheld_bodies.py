"""Flow control of request bodies: the engine asks for those that the coordinator withheld, as it can admit them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from megatron_runtime.wire.codec import MAX_BATCH

WINDOW_BYTES = 16 * 2**20
"""Bytes that are asked for and not admitted yet, beside the last body that was asked for."""


class WithheldBodies:
    """The assigned requests whose bodies are missing, in their order.

    Args:
        ask: Sends the UUIDs of requests to the coordinator, which answers with their bodies or releases them.
    """

    def __init__(self, ask: Callable[[list[bytes]], None]) -> None:
        self._ask = ask
        self._sizes: dict[bytes, int] = {}
        self._waiting: deque[bytes] = deque()
        self._asked: set[bytes] = set()
        self._asked_bytes = 0

    def add(self, uuid: bytes, size: int) -> None:
        """A body of this size is missing."""
        if uuid not in self._sizes:
            self._sizes[uuid] = size
            self._waiting.append(uuid)

    def remove(self, uuid: bytes) -> None:
        """The body was admitted, or is not needed any more."""
        size = self._sizes.pop(uuid, 0)
        if uuid in self._asked:
            self._asked.discard(uuid)
            self._asked_bytes -= size

    def clear(self) -> None:
        """None is missing."""
        self._sizes.clear()
        self._waiting.clear()
        self._asked.clear()
        self._asked_bytes = 0

    def ask(self) -> None:
        """Ask for as many bodies as the window allows."""
        batch: list[bytes] = []
        while self._waiting and self._asked_bytes < WINDOW_BYTES and len(batch) < MAX_BATCH:
            uuid = self._waiting.popleft()
            if self._note(uuid):
                batch.append(uuid)
        if batch:
            self._ask(batch)

    def ask_now(self, uuid: bytes) -> None:
        """Ask for this body, if it is missing and was not asked for, whatever the window allows."""
        if self._note(uuid):
            self._ask([uuid])

    def _note(self, uuid: bytes) -> bool:
        if uuid not in self._sizes or uuid in self._asked:
            return False
        self._asked.add(uuid)
        self._asked_bytes += self._sizes[uuid]
        return True
