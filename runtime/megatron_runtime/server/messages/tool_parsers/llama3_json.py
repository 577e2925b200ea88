"""Calls as Llama 3 writes them: an answer that is ``{"name": ..., "parameters": {...}}``, or several with ``;``."""

from __future__ import annotations

from megatron_runtime.server.messages.message_parts import Content, Part
from megatron_runtime.server.messages.tool_parsers.json_call import JsonCall

TAG = "<|python_tag|>"


class Llama3JsonReader:
    """A ``PartReader``. Only a text that begins with a call has any; the tag before it may be there or not."""

    def __init__(self) -> None:
        self._held = ""
        self._opening = ""
        self._call: JsonCall | None = None
        self._has_called = False
        self._has_words = False

    def push(self, text: str) -> list[Part]:
        """See ``PartReader``."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            if self._has_words:
                parts.append(Content(self._held))
                self._held = ""
            elif self._call is not None:
                parts += self._go_on(self._call)
            elif not self._find_call():
                break
        return parts

    def finish(self) -> list[Part]:
        """See ``PartReader``."""
        if self._call is None:
            return [Content(self._held)]
        parts = self._call.finish()
        return [Content(self._opening + self._call.text)] if self._call.is_none else parts

    def _find_call(self) -> bool:
        """Whether it is certain what comes: a call, or words."""
        rest = self._held.lstrip(" \t\r\n;,") if self._has_called else self._held.lstrip()
        if not self._has_called and rest.startswith(TAG):
            rest = rest[len(TAG) :].lstrip()
        elif not rest or (not self._has_called and TAG.startswith(rest)):
            return False
        if not rest:
            return False
        if rest[0] == "{":
            self._opening = self._held[: len(self._held) - len(rest)]
            self._call, self._held = JsonCall(needs_arguments=True), rest
        else:
            self._has_words = True
        return True

    def _go_on(self, call: JsonCall) -> list[Part]:
        parts, self._held = call.push(self._held)
        if not call.is_over:
            return parts
        self._call = None
        if call.is_none:
            self._has_words = True
            return [Content(self._opening + call.text)]
        self._has_called = True
        return parts
