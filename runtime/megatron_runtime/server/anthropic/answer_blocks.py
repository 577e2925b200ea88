"""Content blocks of an answer in Anthropic's Messages API: text, thinking and tool use, each with its stream events."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from pydantic_core import from_json

Event = dict[str, Any]


class AnswerBlock(ABC):
    """One block, built from pieces of text.

    Args:
        index: Its index in the content.
    """

    kind: ClassVar[str]
    """The type of its deltas."""
    field: ClassVar[str]
    """The field of a delta that has the text."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The complete block."""

    @abstractmethod
    def empty(self) -> dict[str, Any]:
        """The block before its first delta."""

    def opening(self) -> list[Event]:
        """Events before the first text."""
        return [{"type": "content_block_start", "index": self.index, "content_block": self.empty()}]

    def add(self, text: str) -> list[Event]:
        """Adds text."""
        self._pieces.append(text)
        return [self._delta(self.kind, self.field, text)]

    def closing(self) -> list[Event]:
        """Events after the last text."""
        return [{"type": "content_block_stop", "index": self.index}]

    def _delta(self, kind: str, field: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, field: text}}


class TextAnswerBlock(AnswerBlock):
    """Text for the user."""

    kind, field = "text_delta", "text"

    def empty(self) -> dict[str, Any]:
        """The block before its first delta."""
        return {"type": "text", "text": "", "citations": None}

    def body(self) -> dict[str, Any]:
        """The complete block."""
        return {**self.empty(), "text": self.text}


class ThinkingAnswerBlock(AnswerBlock):
    """Reasoning before the answer.

    Clients return the block unchanged with its signature, which this server does not check: it is a hash of the text.

    Args:
        index: Its index in the content.
        is_omitted: Whether the client asked for blocks without the text.
    """

    kind, field = "thinking_delta", "thinking"

    def __init__(self, index: int, *, is_omitted: bool) -> None:
        super().__init__(index)
        self._is_omitted = is_omitted

    def empty(self) -> dict[str, Any]:
        """The block before its first delta."""
        return {"type": "thinking", "thinking": "", "signature": ""}

    def body(self) -> dict[str, Any]:
        """The complete block."""
        return {**self.empty(), "thinking": "" if self._is_omitted else self.text, "signature": self._signature}

    def add(self, text: str) -> list[Event]:
        """Adds text."""
        events = super().add(text)
        return [] if self._is_omitted else events

    def closing(self) -> list[Event]:
        """Events after the last text."""
        return [self._delta("signature_delta", "signature", self._signature), *super().closing()]

    @property
    def _signature(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class ToolUseAnswerBlock(AnswerBlock):
    """A tool call; its text is the input as JSON.

    Args:
        index: Its index in the content.
        name: The tool.
        call_id: Identifies the call in its result.
    """

    kind, field = "input_json_delta", "partial_json"

    def __init__(self, index: int, *, name: str, call_id: str) -> None:
        super().__init__(index)
        self._name = name
        self._call_id = call_id

    def empty(self) -> dict[str, Any]:
        """The block before its first delta."""
        called = {"id": self._call_id, "caller": {"type": "direct"}, "name": self._name, "input": {}}
        return {"type": "tool_use", **called}

    def body(self) -> dict[str, Any]:
        """The complete block. An input that the token limit cuts off has its complete values."""
        made = from_json(self.text, allow_partial=True) if self.text.strip() else {}
        return {**self.empty(), "input": made if isinstance(made, dict) else {}}
