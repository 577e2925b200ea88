"""Output items of a response: reasoning, message and function call, each with its stream events."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

Event = tuple[str, dict[str, Any]]
"""The type of an event, without the prefix ``response.``, and its fields."""


class Item(ABC):
    """One output item, built from pieces of text.

    Args:
        index: Its index in the output.
        number: A unique string, for its id.
    """

    prefix: ClassVar[str]
    """Prefix of the item's id."""

    def __init__(self, index: int, number: str) -> None:
        self.index = index
        self.id = f"{self.prefix}_{number}"
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def location(self) -> dict[str, Any]:
        """Its location, as fields of an event."""
        return {"item_id": self.id, "output_index": self.index}

    @abstractmethod
    def body(self, status: str) -> dict[str, Any]:
        """The item so far."""

    def opening(self) -> list[Event]:
        """Events before the first text."""
        return [("output_item.added", {"output_index": self.index, "item": self.body("in_progress")})]

    @abstractmethod
    def add(self, text: str) -> Event:
        """Adds text."""

    def closing(self, status: str) -> list[Event]:
        """Events after the last text."""
        return [("output_item.done", {"output_index": self.index, "item": self.body(status)})]


class _TextItem(Item):
    """An item with one text part."""

    kind: ClassVar[str]
    """The type of the part."""

    def __init__(self, index: int, number: str) -> None:
        super().__init__(index, number)
        self._has_part = False

    @property
    def location(self) -> dict[str, Any]:
        """Location of the part."""
        return {**super().location, "content_index": 0}

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """The part so far."""

    def opening(self) -> list[Event]:
        """Events before the first text."""
        events = super().opening()
        self._has_part = True
        return [*events, ("content_part.added", {**self.location, "part": self.part()})]

    def add(self, text: str) -> Event:
        """Adds text."""
        self._pieces.append(text)
        return f"{self.kind}.delta", {**self.location, "delta": text}

    def closing(self, status: str) -> list[Event]:
        """Events after the last text."""
        done = {name: value for name, value in self.part().items() if name in ("text", "logprobs")}
        return [
            (f"{self.kind}.done", {**self.location, **done}),
            ("content_part.done", {**self.location, "part": self.part()}),
            *super().closing(status),
        ]

    def content(self) -> list[dict[str, Any]]:
        """The part, if it has begun."""
        return [self.part()] if self._has_part else []


class MessageItem(_TextItem):
    """Text for the user."""

    prefix = "msg"
    kind = "output_text"

    def __init__(self, index: int, number: str) -> None:
        super().__init__(index, number)
        self._logprobs: list[dict[str, Any]] = []

    def part(self) -> dict[str, Any]:
        """The part so far."""
        return {"type": self.kind, "annotations": [], "text": self.text, "logprobs": list(self._logprobs)}

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        """Adds text with the log probabilities of its tokens."""
        kind, fields = super().add(text)
        self._logprobs += logprobs
        return kind, {**fields, "logprobs": list(logprobs)}

    def body(self, status: str) -> dict[str, Any]:
        """The item so far."""
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": self.content()}


class ReasoningItem(_TextItem):
    """Reasoning."""

    prefix = "rs"
    kind = "reasoning_text"

    def part(self) -> dict[str, Any]:
        """The part so far."""
        return {"type": self.kind, "text": self.text}

    def body(self, status: str) -> dict[str, Any]:
        """The item so far."""
        return {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": self.content()}


class FunctionCallItem(Item):
    """A tool call; its text is the arguments."""

    prefix = "fc"

    def __init__(self, index: int, number: str, *, name: str, call_id: str) -> None:
        super().__init__(index, number)
        self._name = name
        self._call_id = call_id

    def add(self, text: str) -> Event:
        """Adds a piece of the arguments."""
        self._pieces.append(text)
        return "function_call_arguments.delta", {**self.location, "delta": text}

    def closing(self, status: str) -> list[Event]:
        """Events after the last piece of the arguments."""
        done = {**self.location, "name": self._name, "arguments": self.text}
        return [("function_call_arguments.done", done), *super().closing(status)]

    def body(self, status: str) -> dict[str, Any]:
        """The item so far."""
        called = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"type": "function_call", "id": self.id, "status": status, **called}


def item_number() -> str:
    """A unique string for the id of an item."""
    return uuid.uuid4().hex
