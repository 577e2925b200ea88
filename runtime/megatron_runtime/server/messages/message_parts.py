"""What a message is made of, in the order in which the model says it: reasoning, words, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Words for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning before the words."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of a tool begins."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """JSON of the arguments, or more of it, of the call that began last."""

    text: str


Part = Content | Reasoning | CallStart | CallArguments


class PartReader(Protocol):
    """Finds the parts in a text that comes in pieces. However it is cut, the parts joined are the same."""

    def push(self, text: str) -> list[Part]:
        """What is certain now, given more text."""
        ...

    def finish(self) -> list[Part]:
        """What is left when the text is over."""
        ...


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts with neighbours of one kind in one, and none that is empty."""
    whole: list[Part] = []
    told = (part for part in parts if isinstance(part, CallStart) or part.text)
    for kind, neighbours in groupby(told, type):
        if kind is CallStart:
            whole += neighbours
        else:
            whole.append(kind("".join(part.text for part in neighbours if not isinstance(part, CallStart))))
    return whole
