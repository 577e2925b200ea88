"""Thoughts that a model writes before its answer: ``<think>...</think>``."""

from __future__ import annotations

from enum import Enum, auto

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import Content, Part, Reasoning

BEGIN = "<think>"
END = "</think>"


class _Place(Enum):
    BEFORE = auto()
    THOUGHTS = auto()
    GAP = auto()
    ANSWER = auto()


class ThinkingReader:
    """A ``PartReader``. White space around the thoughts, and before the answer after them, is left out.

    Args:
        is_thinking: The text begins with thoughts, whether their mark is there or not.
    """

    def __init__(self, *, is_thinking: bool) -> None:
        self._is_thinking = is_thinking
        self._place = _Place.BEFORE
        self._held = ""
        self._has_thoughts = False

    def push(self, text: str) -> list[Part]:
        """See ``PartReader``."""
        self._held += text
        parts: list[Part] = []
        if self._place is _Place.BEFORE:
            self._find_thoughts()
        if self._place is _Place.THOUGHTS:
            parts += self._think()
        if self._place is _Place.GAP and self._held.strip():
            self._place, self._held = _Place.ANSWER, self._held.lstrip()
        if self._place is _Place.ANSWER:
            parts.append(Content(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """See ``PartReader``."""
        match self._place:
            case _Place.BEFORE:
                return [Reasoning(self._held.strip()) if self._is_thinking else Content(self._held)]
            case _Place.THOUGHTS:
                return [Reasoning(self._held.rstrip())]
        return []

    def _find_thoughts(self) -> None:
        rest = self._held.lstrip()
        if BEGIN.startswith(rest) and rest != BEGIN:
            return
        if rest.startswith(BEGIN) or self._is_thinking:
            self._held = rest.removeprefix(BEGIN)
            self._place = _Place.THOUGHTS
        else:
            self._place = _Place.ANSWER

    def _think(self) -> list[Part]:
        if not self._has_thoughts:
            self._held = self._held.lstrip()
        thoughts, mark, rest = split_at(self._held, (END,))
        told = thoughts.rstrip()
        if mark is None:
            self._held = thoughts[len(told) :] + rest
        else:
            self._place, self._held = _Place.GAP, rest
        self._has_thoughts = self._has_thoughts or bool(told)
        return [Reasoning(told)]
