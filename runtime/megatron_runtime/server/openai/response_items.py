"""Items of a response's output: reasoning, a message, and calls of tools, each with the events that build it up."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

Event = tuple[str, dict[str, Any]]
"""The type of an event without ``response.``, and its fields."""


class Item(ABC):
    """One item, which grows by text.

    Args:
        index: Its place in the output.
        number: Something that no other item has, for its id.
    """

    prefix: ClassVar[str]
    """What its id begins with."""

    def __init__(self, index: int, number: str) -> None:
        self.index = index
        self.id = f"{self.prefix}_{number}"
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self._pieces)

    @property
    def place(self) -> dict[str, Any]:
        """Where it is, as events say it."""
        return {"item_id": self.id, "output_index": self.index}

    @abstractmethod
    def body(self, status: str) -> dict[str, Any]:
        """The item as far as it is."""

    def opening(self) -> list[Event]:
        """Events before any text."""
        return [("output_item.added", {"output_index": self.index, "item": self.body("in_progress")})]

    @abstractmethod
    def add(self, text: str) -> Event:
        """Take more text."""

    def closing(self, status: str) -> list[Event]:
        """Events after all text."""
        return [("output_item.done", {"output_index": self.index, "item": self.body(status)})]


class _TextItem(Item):
    """An item whose content is one part with text."""

    kind: ClassVar[str]
    """The type of that part."""

    def __init__(self, index: int, number: str) -> None:
        super().__init__(index, number)
        self._has_part = False

    @property
    def place(self) -> dict[str, Any]:
        """Where the part is."""
        return {**super().place, "content_index": 0}

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """The part as far as it is."""

    def opening(self) -> list[Event]:
        """Events before any text."""
        events = super().opening()
        self._has_part = True
        return [*events, ("content_part.added", {**self.place, "part": self.part()})]

    def add(self, text: str) -> Event:
        """Take more text."""
        self._pieces.append(text)
        return f"{self.kind}.delta", {**self.place, "delta": text}

    def closing(self, status: str) -> list[Event]:
        """Events after all text."""
        done = {name: value for name, value in self.part().items() if name in ("text", "logprobs")}
        return [
            (f"{self.kind}.done", {**self.place, **done}),
            ("content_part.done", {**self.place, "part": self.part()}),
            *super().closing(status),
        ]

    def content(self) -> list[dict[str, Any]]:
        """The part, once there is one."""
        return [self.part()] if self._has_part else []


class MessageItem(_TextItem):
    """Words for the reader."""

    prefix = "msg"
    kind = "output_text"

    def __init__(self, index: int, number: str) -> None:
        super().__init__(index, number)
        self._logprobs: list[dict[str, Any]] = []

    def part(self) -> dict[str, Any]:
        """The part as far as it is."""
        return {"type": self.kind, "annotations": [], "text": self.text, "logprobs": list(self._logprobs)}

    def add(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        """Take more text, with the log probabilities of its tokens."""
        kind, fields = super().add(text)
        self._logprobs += logprobs
        return kind, {**fields, "logprobs": list(logprobs)}

    def body(self, status: str) -> dict[str, Any]:
        """The item as far as it is."""
        return {"type": "message", "id": self.id, "role": "assistant", "status": status, "content": self.content()}


class ReasoningItem(_TextItem):
    """Reasoning."""

    prefix = "rs"
    kind = "reasoning_text"

    def part(self) -> dict[str, Any]:
        """The part as far as it is."""
        return {"type": self.kind, "text": self.text}

    def body(self, status: str) -> dict[str, Any]:
        """The item as far as it is."""
        return {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": self.content()}


class FunctionCallItem(Item):
    """A call of a tool; its text is the arguments."""

    prefix = "fc"

    def __init__(self, index: int, number: str, *, name: str, call_id: str) -> None:
        super().__init__(index, number)
        self._name = name
        self._call_id = call_id

    def add(self, text: str) -> Event:
        """Take more of the arguments."""
        self._pieces.append(text)
        return "function_call_arguments.delta", {**self.place, "delta": text}

    def closing(self, status: str) -> list[Event]:
        """Events after all arguments."""
        done = {**self.place, "name": self._name, "arguments": self.text}
        return [("function_call_arguments.done", done), *super().closing(status)]

    def body(self, status: str) -> dict[str, Any]:
        """The item as far as it is."""
        called = {"call_id": self._call_id, "name": self._name, "arguments": self.text}
        return {"type": "function_call", "id": self.id, "status": status, **called}


def item_number() -> str:
    """Something for the id of an item that no other has."""
    return uuid.uuid4().hex
