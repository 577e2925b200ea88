"""Calls as a JSON list of objects after a marker: the formats of Mistral, Granite and Phi-4-mini."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import Content, Part
from megatron_runtime.server.messages.tool_parsers.json_call import JsonCall
from megatron_runtime.server.messages.tool_parsers.stepped_parser import SteppedParser


class ListState(Enum):
    """What a ``JsonListParser`` reads."""

    CONTENT = auto()
    AFTER_MARKER = auto()
    LIST = auto()
    OBJECT = auto()
    OTHER = auto()


class JsonListParser(SteppedParser):
    """A ``PartParser``. A list of calls or one call follows each marker; content may follow after it.

    Args:
        markers: The markers; the list has begun if one ends with ``[``.
        ends: Optional markers after the calls.
    """

    def __init__(self, markers: Sequence[str], ends: Sequence[str] = ()) -> None:
        super().__init__()
        self._markers = tuple(markers)
        self._ends = tuple(ends)
        self._state = ListState.CONTENT
        self._opening = ""  # the text since the marker, until a call begins
        self._is_in_list = False
        self._is_open = False
        self._call = JsonCall()

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        match self._state:
            case ListState.CONTENT:
                return [Content(self._held)]
            case ListState.OBJECT:
                parts = self._call.finish()
                return [Content(self._opening + self._call.text)] if self._call.is_invalid else parts
        return [Content(self._opening + self._held)]

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case ListState.CONTENT:
                return self._find_marker(parts)
            case ListState.AFTER_MARKER:
                self._read_after_marker()
            case ListState.LIST:
                self._go_on_in_list(parts)
            case ListState.OBJECT:
                self._go_on_in_object(parts)
            case ListState.OTHER:
                return self._read_other(parts)
        return True

    def _read_other(self, parts: list[Part]) -> bool:
        """Reads what is neither a list nor an object after the marker: content."""
        parts.append(Content(self._opening))
        self._end()
        self._is_open = False
        return True

    def _end(self) -> None:
        """Goes on with content."""
        self._state, self._opening, self._is_open = ListState.CONTENT, "", True

    def _find_marker(self, parts: list[Part]) -> bool:
        before, marker, self._held = split_at(self._held, (*self._markers, *(self._ends if self._is_open else ())))
        parts.append(Content(before))
        if marker is None:
            return False
        self._is_open = False
        if marker in self._markers:
            self._is_in_list = marker.endswith("[")
            self._state = ListState.LIST if self._is_in_list else ListState.AFTER_MARKER
            self._opening = marker
        return True

    def _read_after_marker(self) -> None:
        char = self._held[0]
        if char == "[" or char.isspace():
            self._drop(char)
            self._is_in_list = char == "["
            self._state = ListState.LIST if self._is_in_list else ListState.AFTER_MARKER
        elif char == "{":
            self._begin_object()
        else:
            self._state = ListState.OTHER

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
        is_open = not self._opening
        parts.append(Content(self._opening))
        self._end()
        self._is_open = is_open

    def _drop(self, text: str) -> None:
        """Drops text before or between calls; it is kept as content only if no call follows the marker."""
        if self._opening:
            self._opening += text
        self._held = self._held[len(text) :]

    def _begin_object(self) -> None:
        self._call = JsonCall()
        self._state = ListState.OBJECT

    def _go_on_in_object(self, parts: list[Part]) -> None:
        new, self._held = self._call.push(self._held)
        parts += new
        if not self._call.is_finished:
            return
        is_valid = not self._call.is_invalid
        if not is_valid:
            parts.append(Content(self._opening + self._call.text))
        self._end()
        if self._is_in_list and is_valid:
            self._state = ListState.LIST
