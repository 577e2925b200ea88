"""Builds one message of an answer from its parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_runtime.server.messages.message_format import ResponseParsing
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part, Reasoning


@dataclass
class Call:
    """A tool call with the arguments received so far."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """The call in the format of OpenAI's API."""
        return _call_body(self.id, self.name, "".join(self.arguments))


class MessageBuilder:
    """Adds parts to a message, and returns the deltas for a stream.

    Args:
        parsing: How the answer is parsed.
        shows_reasoning: Whether the message includes reasoning.
    """

    def __init__(self, parsing: ResponseParsing, *, shows_reasoning: bool = True) -> None:
        self._call_id = parsing.call_id
        self._has_reasoning = parsing.has_parser and shows_reasoning
        self._named = parsing.tools.named
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Call] = []
        """The calls so far."""

    def add(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Adds parts; returns the ``delta`` of a chunk for each."""
        return [delta for part in parts if (delta := self._add(part))]

    def add_text(self, text: str) -> list[dict[str, Any]]:
        """Like ``add``, but for plain text, which is the most frequent case."""
        if not text:
            return []
        self._content.append(text)
        return [{"content": text}]

    def body(self) -> dict[str, Any]:
        """The whole message."""
        content = "".join(self._content)
        reasoning = "".join(self._reasoning)
        calls = {"tool_calls": [call.body() for call in self.calls]} if self.calls else {}
        is_silent = not content and bool(reasoning or self.calls)
        return {
            "role": "assistant",
            "content": None if is_silent else content,
            "refusal": None,
            "annotations": [],
            **(_reasoning_field(reasoning or None) if self._has_reasoning else {}),
            **calls,
        }

    def finish_reason(self, reason: str | None) -> str | None:
        """``tool_calls`` if the model chose to call tools; ``stop`` for a named function, as in OpenAI's API."""
        return "tool_calls" if reason == "stop" and self.calls and self._named is None else reason

    def _add(self, part: Part) -> dict[str, Any]:
        match part:
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case Reasoning(text):
                self._reasoning.append(text)
                return _reasoning_field(text) if self._has_reasoning else {}
            case CallStart(name, own_id):
                self.calls.append(Call(own_id or self._call_id(), name))
                return self._call_delta(_call_body(self.calls[-1].id, name, ""))
            case CallArguments(text):
                self.calls[-1].arguments.append(text)
                return self._call_delta({"function": {"arguments": text}})

    def _call_delta(self, new: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": len(self.calls) - 1, **new}]}


def _call_body(name: str, function: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def _reasoning_field(text: str | None) -> dict[str, Any]:
    """The field under DeepSeek's name and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}
