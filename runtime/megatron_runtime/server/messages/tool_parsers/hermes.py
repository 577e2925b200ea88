"""Calls in the format of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import Content, Part
from megatron_runtime.server.messages.tool_parsers.json_call import JsonCall

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser:
    """A ``PartParser``. Text after a marker that is not a valid call becomes content."""

    def __init__(self) -> None:
        self._held = ""
        self._call: JsonCall | None = None
        self._is_open = False

    def push(self, text: str) -> list[Part]:
        """See ``PartParser``."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            if self._call is not None:
                parts += self._go_on(self._call)
                continue
            before, marker, self._held = split_at(self._held, (BEGIN, END) if self._is_open else (BEGIN,))
            parts.append(Content(before))
            if marker is None:
                break
            self._is_open = False
            self._call = JsonCall() if marker == BEGIN else None
        return parts

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        if self._call is None:
            return [Content(self._held)]
        parts = self._call.finish()
        return [Content(BEGIN + self._call.text)] if self._call.is_invalid else parts

    def _go_on(self, call: JsonCall) -> list[Part]:
        parts, self._held = call.push(self._held)
        if call.is_finished:
            self._call = None
            self._is_open = not call.is_invalid
        return [Content(BEGIN + call.text)] if call.is_invalid else parts
