"""Calls in the format of Llama 3 and 4: the answer is ``{"name": ..., "parameters": {...}}``, or several separated by
``;``."""

from __future__ import annotations

from megatron_runtime.server.messages.message_parts import Content, Part
from megatron_runtime.server.messages.tool_parsers.json_call import JsonCall

TAGS = ("<|python_tag|>", "<|python_start|>")
"""Optional markers before the calls, of Llama 3 and Llama 4."""
END = "<|python_end|>"
"""Optional marker after the calls."""


class Llama3JsonParser:
    """A ``PartParser``. Calls are parsed only at the beginning of the text; the tags around them are optional."""

    def __init__(self) -> None:
        self._held = ""
        self._opening = ""
        self._call: JsonCall | None = None
        self._has_called = False
        self._is_text = False

    def push(self, text: str) -> list[Part]:
        """See ``PartParser``."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            if self._is_text:
                parts.append(Content(self._held))
                self._held = ""
            elif self._call is not None:
                parts += self._go_on(self._call)
            elif not self._find_call():
                break
        return parts

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        if self._call is None:
            return [Content(self._held)]
        parts = self._call.finish()
        return [Content(self._opening + self._call.text)] if self._call.is_invalid else parts

    def _find_call(self) -> bool:
        """Whether it is certain that a call or content follows."""
        rest = self._held.lstrip(" \t\r\n;,") if self._has_called else self._held.lstrip()
        tags = (END,) if self._has_called else TAGS
        if any(tag.startswith(rest) and tag != rest for tag in tags):
            return False
        tag = next((tag for tag in tags if rest.startswith(tag)), "")
        if tag == END:
            self._held, self._is_text = rest.removeprefix(END), True
            return True
        rest = rest.removeprefix(tag).lstrip()
        if not rest:
            return False
        if rest[0] == "{":
            self._opening = self._held[: len(self._held) - len(rest)]
            self._call, self._held = JsonCall(needs_arguments=True), rest
        else:
            self._is_text = True
        return True

    def _go_on(self, call: JsonCall) -> list[Part]:
        parts, self._held = call.push(self._held)
        if not call.is_finished:
            return parts
        self._call = None
        if call.is_invalid:
            self._is_text = True
            return [Content(self._opening + call.text)]
        self._has_called = True
        return parts
