"""Calls in the format of Mistral: ``[TOOL_CALLS]`` and a list of objects; newer models: a name and an object."""

from __future__ import annotations

from enum import Enum, auto

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part
from megatron_runtime.server.messages.tool_parsers.json_call import JsonCall
from megatron_runtime.server.messages.tool_parsers.json_value import JsonValue
from megatron_runtime.server.messages.tool_parsers.stepped_parser import SteppedParser

MARKER = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"


class _MistralState(Enum):
    CONTENT = auto()
    AFTER_MARKER = auto()
    LIST = auto()
    OBJECT = auto()
    NAME = auto()
    ARGUMENTS = auto()


class MistralParser(SteppedParser):
    """A ``PartParser``. A list or one call follows each marker; content may follow after it."""

    def __init__(self) -> None:
        super().__init__()
        self._state = _MistralState.CONTENT
        self._opening = ""  # the text since the marker, until a call begins
        self._is_in_list = False
        self._call = JsonCall()
        self._value = JsonValue()

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        match self._state:
            case _MistralState.CONTENT:
                return [Content(self._held)]
            case _MistralState.OBJECT:
                parts = self._call.finish()
                return [Content(self._opening + self._call.text)] if self._call.is_invalid else parts
            case _MistralState.ARGUMENTS:
                return []
        return [Content(self._opening + self._held)]

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case _MistralState.CONTENT:
                before, marker, self._held = split_at(self._held, (MARKER,))
                parts.append(Content(before))
                if marker is None:
                    return False
                self._state, self._opening, self._is_in_list = _MistralState.AFTER_MARKER, MARKER, False
            case _MistralState.AFTER_MARKER:
                self._read_after_marker()
            case _MistralState.LIST:
                self._go_on_in_list(parts)
            case _MistralState.OBJECT:
                self._go_on_in_object(parts)
            case _MistralState.NAME:
                return self._find_arguments(parts)
            case _MistralState.ARGUMENTS:
                self._go_on_in_arguments(parts)
        return True

    def _read_after_marker(self) -> None:
        char = self._held[0]
        if char == "[" or char.isspace():
            self._drop(char)
            self._is_in_list = char == "["
            self._state = _MistralState.LIST if self._is_in_list else _MistralState.AFTER_MARKER
        elif char == "{":
            self._begin_object()
        else:
            self._state = _MistralState.NAME

    def _go_on_in_list(self, parts: list[Part]) -> None:
        rest = self._held.lstrip(" \t\r\n,")
        self._drop(self._held[: len(self._held) - len(rest)])
        if not rest:
            return
        if rest[0] == "{":
            self._begin_object()
            return
        if rest[0] == "]":
            self._drop("]")
        parts.append(Content(self._opening))
        self._state = _MistralState.CONTENT

    def _drop(self, text: str) -> None:
        """Drops text before or between calls; it is kept as content only if no call follows the marker."""
        if self._opening:
            self._opening += text
        self._held = self._held[len(text) :]

    def _begin_object(self) -> None:
        self._call = JsonCall()
        self._state = _MistralState.OBJECT

    def _go_on_in_object(self, parts: list[Part]) -> None:
        new, self._held = self._call.push(self._held)
        parts += new
        if not self._call.is_finished:
            return
        if self._call.is_invalid:
            parts.append(Content(self._opening + self._call.text))
        self._state = _MistralState.LIST if self._is_in_list and not self._call.is_invalid else _MistralState.CONTENT
        self._opening = ""

    def _find_arguments(self, parts: list[Part]) -> bool:
        at = self._held.find("{")
        if at < 0:
            return False
        header, rest = self._held[:at], self._held[at:]
        name = header.removesuffix(ARGUMENTS).split(CALL_ID)[0].strip()
        self._held = rest
        if not name or any(char.isspace() for char in name):
            parts.append(Content(self._opening + header))
            self._state = _MistralState.CONTENT
        else:
            parts.append(CallStart(name))
            self._value, self._state = JsonValue(), _MistralState.ARGUMENTS
        return True

    def _go_on_in_arguments(self, parts: list[Part]) -> None:
        for at, char in enumerate(self._held):
            added = None if self._value.is_closed else self._value.push(char)
            if added is None:
                self._held = self._held[at:]
                self._state = _MistralState.CONTENT
                return
            parts.append(CallArguments(added))
        self._held = ""
        self._state = _MistralState.CONTENT if self._value.is_closed else self._state
