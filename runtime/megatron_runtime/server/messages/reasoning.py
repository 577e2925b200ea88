"""Parser for reasoning before the answer: ``<think>...</think>``."""

from __future__ import annotations

from enum import Enum, auto

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import Content, Part, Reasoning

BEGIN = "<think>"
END = "</think>"


class _ReasoningState(Enum):
    BEFORE = auto()
    REASONING = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningParser:
    """A ``PartParser``. White space around the reasoning is dropped.

    Args:
        in_reasoning: The text begins with reasoning even if it has no marker.
    """

    def __init__(self, *, in_reasoning: bool) -> None:
        self._in_reasoning = in_reasoning
        self._state = _ReasoningState.BEFORE
        self._held = ""
        self._has_reasoning = False

    def push(self, text: str) -> list[Part]:
        """See ``PartParser``."""
        self._held += text
        parts: list[Part] = []
        if self._state is _ReasoningState.BEFORE:
            self._find_reasoning()
        if self._state is _ReasoningState.REASONING:
            parts += self._think()
        if self._state is _ReasoningState.GAP and self._held.strip():
            self._state, self._held = _ReasoningState.ANSWER, self._held.lstrip()
        if self._state is _ReasoningState.ANSWER:
            parts.append(Content(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        match self._state:
            case _ReasoningState.BEFORE:
                return [Reasoning(self._held.strip()) if self._in_reasoning else Content(self._held)]
            case _ReasoningState.REASONING:
                return [Reasoning(self._held.rstrip())]
        return []

    def _find_reasoning(self) -> None:
        rest = self._held.lstrip()
        if BEGIN.startswith(rest) and rest != BEGIN:
            return
        if rest.startswith(BEGIN) or self._in_reasoning:
            self._held = rest.removeprefix(BEGIN)
            self._state = _ReasoningState.REASONING
        else:
            self._state = _ReasoningState.ANSWER

    def _think(self) -> list[Part]:
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        reasoning, marker, rest = split_at(self._held, (END,))
        text = reasoning.rstrip()
        if marker is None:
            self._held = reasoning[len(text) :] + rest
        else:
            self._state, self._held = _ReasoningState.GAP, rest
        self._has_reasoning = self._has_reasoning or bool(text)
        return [Reasoning(text)]
