"""A reader that goes through what it holds step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_runtime.server.messages.message_parts import Part


class SteppedReader(ABC):
    """The ``push`` of a ``PartReader`` whose steps each look at the beginning of what is held."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """See ``PartReader``."""
        self._held += text
        parts: list[Part] = []
        while self._held and self._step(parts):
            pass
        return parts

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """Reads on; whether there is more to do with what is held."""
