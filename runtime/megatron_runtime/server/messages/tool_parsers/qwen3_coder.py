"""Calls in the format of Qwen3-Coder: ``<function=f><parameter=a>1</parameter></function>`` within Hermes' markers.

Values are plain text; their JSON types come from the schema of the function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part
from megatron_runtime.server.messages.tool_parsers.stepped_parser import SteppedParser

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"

Schemas = Mapping[str, Mapping[str, Any]]


class _Qwen3CoderState(Enum):
    CONTENT = auto()
    AFTER_MARKER = auto()
    NAME = auto()
    PARAMETERS = auto()
    KEY = auto()
    VALUE = auto()
    TEXT = auto()


class Qwen3CoderParser(SteppedParser):
    """A ``PartParser``. String values are streamed, other values are emitted when complete.

    Args:
        schemas: Schemas of the functions' arguments, by function name.
    """

    def __init__(self, schemas: Schemas) -> None:
        super().__init__()
        self._schemas = schemas
        self._state = _Qwen3CoderState.CONTENT
        self._opening = ""
        self._is_open = False
        self._properties: Mapping[str, Any] = {}
        self._has_values = False
        self._types: frozenset[str] = frozenset()
        self._is_at_start = False

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        match self._state:
            case _Qwen3CoderState.CONTENT | _Qwen3CoderState.AFTER_MARKER | _Qwen3CoderState.NAME:
                return [Content(self._opening + self._held)]
            case _Qwen3CoderState.TEXT:
                return [CallArguments(_escaped(self._unstarted(self._held)))]
        return []

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case _Qwen3CoderState.CONTENT:
                return self._find_marker(parts)
            case _Qwen3CoderState.AFTER_MARKER:
                return self._find_function(parts)
            case _Qwen3CoderState.NAME:
                return self._find_name(parts)
            case _Qwen3CoderState.PARAMETERS:
                return self._find_parameter(parts)
            case _Qwen3CoderState.KEY:
                return self._find_key(parts)
            case _Qwen3CoderState.VALUE:
                return self._find_value(parts)
        return self._go_on_in_text(parts)

    def _find_marker(self, parts: list[Part]) -> bool:
        markers = (BEGIN, FUNCTION, END) if self._is_open else (BEGIN, FUNCTION)
        before, marker, self._held = split_at(self._held, markers)
        parts.append(Content(before))
        if marker is None:
            return False
        self._is_open = False
        if marker != END:
            self._state = _Qwen3CoderState.AFTER_MARKER if marker == BEGIN else _Qwen3CoderState.NAME
            self._opening = marker
        return True

    def _find_function(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        if FUNCTION.startswith(rest) and rest != FUNCTION:
            return False
        if rest.startswith(FUNCTION):
            self._opening += self._held[: len(self._held) - len(rest)] + FUNCTION
            self._held, self._state = rest[len(FUNCTION) :], _Qwen3CoderState.NAME
        else:
            self._give_up(parts)
        return True

    def _find_name(self, parts: list[Part]) -> bool:
        name, end, rest = self._held.partition(">")
        if "\n" in name or (end and not name.strip()):
            self._give_up(parts)
            return True
        if not end:
            return False
        self._held, self._opening, self._state = rest, "", _Qwen3CoderState.PARAMETERS
        self._properties = self._schemas.get(name.strip(), {}).get("properties", {})
        self._has_values = False
        parts += [CallStart(name.strip()), CallArguments("{")]
        return True

    def _find_parameter(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip()
        if any(marker.startswith(rest) and rest != marker for marker in (PARAMETER, FUNCTION_END)):
            return False
        if rest.startswith(PARAMETER):
            self._held, self._state = rest[len(PARAMETER) :], _Qwen3CoderState.KEY
            return True
        parts.append(CallArguments("}"))
        self._held, self._state = rest.removeprefix(FUNCTION_END), _Qwen3CoderState.CONTENT
        self._is_open = True
        return True

    def _find_key(self, parts: list[Part]) -> bool:
        key, end, rest = self._held.partition(">")
        if not end:
            return False
        self._held = rest
        self._types = _types(self._properties.get(key))
        is_text = self._types <= {"string"}
        separator = ", " if self._has_values else ""
        quote = '"' if is_text else ""
        parts.append(CallArguments(f"{separator}{_json(key)}: {quote}"))
        self._has_values = True
        self._state, self._is_at_start = (_Qwen3CoderState.TEXT if is_text else _Qwen3CoderState.VALUE), True
        return True

    def _find_value(self, parts: list[Part]) -> bool:
        value, end, rest = self._held.partition(PARAMETER_END)
        if not end:
            return False
        parts.append(CallArguments(_json(_value(value.strip("\n"), self._types))))
        self._held, self._state = rest, _Qwen3CoderState.PARAMETERS
        return True

    def _go_on_in_text(self, parts: list[Part]) -> bool:
        before, marker, self._held = split_at(self._held, ("\n" + PARAMETER_END, PARAMETER_END))
        parts.append(CallArguments(_escaped(self._unstarted(before))))
        if marker is None:
            return False
        parts.append(CallArguments('"'))
        self._state = _Qwen3CoderState.PARAMETERS
        return True

    def _unstarted(self, text: str) -> str:
        """The text without the line break at the beginning of a value."""
        if not self._is_at_start or not text:
            return text
        self._is_at_start = False
        return text.removeprefix("\n")

    def _give_up(self, parts: list[Part]) -> None:
        parts.append(Content(self._opening))
        self._opening, self._state = "", _Qwen3CoderState.CONTENT


def _types(schema: Any) -> frozenset[str]:
    """The types in a schema; string by default."""
    if not isinstance(schema, dict):
        return frozenset({"string"})
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return frozenset(str(kind) for kind in kinds)
    if isinstance(kinds, str):
        return frozenset({kinds})
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return frozenset().union(*map(_types, branches)) if branches else frozenset({"string"})


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
