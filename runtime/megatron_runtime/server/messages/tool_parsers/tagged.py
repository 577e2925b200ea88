"""Calls as tags around a name and named values: the formats of Qwen3-Coder, GLM-4.5 and MiniMax-M2.

Values are plain text; their JSON types come from the schema of the function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from megatron_runtime.guide_schemas import value_types
from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part
from megatron_runtime.server.messages.tool_parsers.stepped_parser import SteppedParser

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Tags:
    """The texts around the parts of a call."""

    function: str
    """Before the name of a function."""
    name_end: str
    """After the name; empty if the name ends with its line, or where another tag begins."""
    function_end: str
    """After the arguments."""
    parameter: str
    """Before the name of a parameter."""
    key_end: str
    """After the name of a parameter."""
    parameter_end: str
    """After a value."""
    value: str = ""
    """Before a value, after white space."""
    begin: str = ""
    """Before one or several calls; optional in the model's text."""
    end: str = ""
    """After these calls."""
    has_lines: bool = False
    """Whether line breaks around a value do not belong to it."""


_NOT_IN_NAME = re.compile(r"[\s<>{}\"]")


class _TaggedState(Enum):
    CONTENT = auto()
    AFTER_MARKER = auto()
    NAME = auto()
    PARAMETERS = auto()
    KEY = auto()
    VALUE = auto()
    TEXT = auto()


class TaggedParser(SteppedParser):
    """A ``PartParser``. String values are streamed, other values are emitted when complete.

    Args:
        tags: The tags of the format.
        schemas: Schemas of the functions' arguments, by function name.
    """

    def __init__(self, tags: Tags, schemas: Schemas) -> None:
        super().__init__()
        self._tags = tags
        self._schemas = schemas
        self._state = _TaggedState.CONTENT
        self._opening = ""
        self._is_open = False
        self._schema: Mapping[str, Any] = {}
        self._has_values = False
        self._types: frozenset[str] = frozenset()
        self._is_at_start = False

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        match self._state:
            case _TaggedState.CONTENT | _TaggedState.AFTER_MARKER | _TaggedState.NAME:
                return [Content(self._opening + self._held)]
            case _TaggedState.TEXT:
                return [CallArguments(_escaped(self._unstarted(self._held)))]
        return []

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case _TaggedState.CONTENT:
                return self._find_marker(parts)
            case _TaggedState.AFTER_MARKER:
                return self._find_function(parts)
            case _TaggedState.NAME:
                return self._find_name(parts)
            case _TaggedState.PARAMETERS:
                return self._find_parameter(parts)
            case _TaggedState.KEY:
                return self._find_key(parts)
            case _TaggedState.VALUE:
                return self._find_value(parts)
        return self._go_on_in_text(parts)

    def _find_marker(self, parts: list[Part]) -> bool:
        tags = self._tags
        markers = [marker for marker in (tags.begin, tags.function, tags.end if self._is_open else "") if marker]
        before, marker, self._held = split_at(self._held, markers)
        parts.append(Content(before))
        if marker is None:
            return False
        self._is_open = False
        if marker != tags.end:
            self._state = _TaggedState.AFTER_MARKER if marker == tags.begin else _TaggedState.NAME
            self._opening = marker
        return True

    def _find_function(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        function = self._tags.function
        if function.startswith(rest) and rest != function:
            return False
        if rest.startswith(function):
            self._opening += self._held[: len(self._held) - len(rest)] + function
            self._held, self._state = rest[len(function) :], _TaggedState.NAME
        else:
            self._give_up(parts)
        return True

    def _find_name(self, parts: list[Part]) -> bool:
        if self._tags.name_end:
            name, end, rest = self._held.partition(self._tags.name_end)
            is_invalid = "\n" in name or bool(end and not name.strip())
        else:
            name, end, rest = self._name_of_line()
            is_invalid = bool(_NOT_IN_NAME.search(name.strip())) or bool(end and not name.strip())
        if is_invalid:
            self._give_up(parts)
            return True
        if not end:
            return False
        self._held, self._opening, self._state = rest, "", _TaggedState.PARAMETERS
        self._schema = self._schemas.get(name.strip(), {})
        self._has_values = False
        parts += [CallStart(name.strip()), CallArguments("{")]
        return True

    def _name_of_line(self) -> tuple[str, str, str]:
        """The name, whatever ends it, and the text after the name."""
        text = self._held.lstrip()
        before, marker, _ = split_at(text, ("\n", self._tags.parameter, self._tags.function_end))
        return before, marker or "", text[len(before) :]

    def _find_parameter(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        tags = self._tags
        if any(marker.startswith(rest) and rest != marker for marker in (tags.parameter, tags.function_end)):
            return False
        if rest.startswith(tags.parameter):
            self._held, self._state = rest[len(tags.parameter) :], _TaggedState.KEY
            return True
        parts.append(CallArguments("}"))
        self._held, self._state = rest.removeprefix(tags.function_end), _TaggedState.CONTENT
        self._is_open = True
        return True

    def _find_key(self, parts: list[Part]) -> bool:
        key, end, rest = self._held.partition(self._tags.key_end)
        value = rest.lstrip()
        if not end or (self._tags.value.startswith(value) and value != self._tags.value):
            return False
        self._held = value.removeprefix(self._tags.value) if self._tags.value else rest
        self._types = value_types(self._schema.get("properties", {}).get(key), self._schema)
        is_text = self._types <= {"string"}
        separator = ", " if self._has_values else ""
        quote = '"' if is_text else ""
        parts.append(CallArguments(f"{separator}{_json(key)}: {quote}"))
        self._has_values = True
        self._state, self._is_at_start = (_TaggedState.TEXT if is_text else _TaggedState.VALUE), True
        return True

    def _find_value(self, parts: list[Part]) -> bool:
        value, end, rest = self._held.partition(self._tags.parameter_end)
        if not end:
            return False
        parts.append(CallArguments(_json(_value(value.strip("\n"), self._types))))
        self._held, self._state = rest, _TaggedState.PARAMETERS
        return True

    def _go_on_in_text(self, parts: list[Part]) -> bool:
        end = self._tags.parameter_end
        before, marker, self._held = split_at(self._held, ("\n" + end, end) if self._tags.has_lines else (end,))
        parts.append(CallArguments(_escaped(self._unstarted(before))))
        if marker is None:
            return False
        parts.append(CallArguments('"'))
        self._state = _TaggedState.PARAMETERS
        return True

    def _unstarted(self, text: str) -> str:
        """The text without the line break at the beginning of a value."""
        if not self._is_at_start or not text:
            return text
        self._is_at_start = False
        return text.removeprefix("\n") if self._tags.has_lines else text

    def _give_up(self, parts: list[Part]) -> None:
        parts.append(Content(self._opening))
        self._opening, self._state = "", _TaggedState.CONTENT


def _value(text: str, types: frozenset[str]) -> Any:
    try:
        value = json.loads(text.lower() if text in ("True", "False", "None") else text)
    except (ValueError, RecursionError):
        return None if text == "None" else text
    return text if "string" in types and value is not None else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _json(text)[1:-1]
