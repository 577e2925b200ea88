"""The parts of a message, in the order of the model's output: reasoning, content, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning before the content."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a tool call."""

    name: str
    id: str | None = None
    """The id that the model gave to the call; None if its format has none."""


@dataclass(frozen=True)
class CallArguments:
    """JSON of the last call's arguments, or a piece of it."""

    text: str


Part = Content | Reasoning | CallStart | CallArguments


class PartParser(Protocol):
    """Parses streamed text into parts. The joined parts do not depend on how the text is split."""

    def push(self, text: str) -> list[Part]:
        """Adds text; returns the parts that are certain now."""
        ...

    def finish(self) -> list[Part]:
        """Ends the text; returns the remaining parts."""
        ...


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbours of one kind merged, and without empty ones."""
    whole: list[Part] = []
    shown = (part for part in parts if isinstance(part, CallStart) or part.text)
    for kind, neighbours in groupby(shown, type):
        if kind is CallStart:
            whole += neighbours
        else:
            whole.append(kind("".join(part.text for part in neighbours if not isinstance(part, CallStart))))
    return whole
