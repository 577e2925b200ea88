"""Calls in the format of Mistral: ``[TOOL_CALLS]`` and a list of objects; newer models: a name and an object."""

from __future__ import annotations

from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part
from megatron_runtime.server.messages.tool_parsers.json_list import JsonListParser
from megatron_runtime.server.messages.tool_parsers.json_value import JsonValue

MARKER = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"


class MistralParser(JsonListParser):
    """A ``PartParser``. A list or one call follows each marker; content may follow after it."""

    def __init__(self) -> None:
        super().__init__((MARKER,))
        self._value: JsonValue | None = None  # the arguments after a name

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        return super().finish() if self._value is None else []

    def _read_other(self, parts: list[Part]) -> bool:
        """Reads a call that is a name and an object."""
        if self._value is None:
            return self._find_arguments(parts)
        self._go_on_in_arguments(self._value, parts)
        return True

    def _find_arguments(self, parts: list[Part]) -> bool:
        at = self._held.find("{")
        if at < 0:
            return False
        header, rest = self._held[:at], self._held[at:]
        name = header.removesuffix(ARGUMENTS).split(CALL_ID)[0].strip()
        self._held = rest
        if not name or any(char.isspace() for char in name):
            parts.append(Content(self._opening + header))
            self._end()
        else:
            parts.append(CallStart(name))
            self._opening, self._value = "", JsonValue()
        return True

    def _go_on_in_arguments(self, value: JsonValue, parts: list[Part]) -> None:
        for at, char in enumerate(self._held):
            added = None if value.is_closed else value.push(char)
            if added is None:
                self._held = self._held[at:]
                self._end_arguments()
                return
            parts.append(CallArguments(added))
        self._held = ""
        if value.is_closed:
            self._end_arguments()

    def _end_arguments(self) -> None:
        self._value = None
        self._end()
