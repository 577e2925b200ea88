"""Base class of parsers with a state machine."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_runtime.server.messages.message_parts import Part


class SteppedParser(ABC):
    """A ``PartParser`` that buffers text; each step consumes the beginning of the buffer."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """See ``PartParser``."""
        self._held += text
        parts: list[Part] = []
        while self._held and self._step(parts):
            pass
        return parts

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """Consumes text from the buffer; returns whether another step is possible without more text."""
