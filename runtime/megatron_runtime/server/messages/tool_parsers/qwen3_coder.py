"""Calls as Qwen3-Coder writes them: ``<function=f><parameter=a>1</parameter></function>`` within Hermes' marks.

Values are plain text there; what they are in JSON follows from the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from megatron_runtime.server.messages.markers import split_at
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part
from megatron_runtime.server.messages.tool_parsers.stepped_reader import SteppedReader

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"

Schemas = Mapping[str, Mapping[str, Any]]


class _Qwen3CoderState(Enum):
    WORDS = auto()
    MARKED = auto()
    NAME = auto()
    PARAMETERS = auto()
    KEY = auto()
    VALUE = auto()
    TEXT = auto()


class Qwen3CoderReader(SteppedReader):
    """A ``PartReader``. Texts among the values are told as they come, others once they are whole.

    Args:
        schemas: Of the functions' arguments, by name.
    """

    def __init__(self, schemas: Schemas) -> None:
        super().__init__()
        self._schemas = schemas
        self._state = _Qwen3CoderState.WORDS
        self._opening = ""
        self._is_open = False
        self._properties: Mapping[str, Any] = {}
        self._has_values = False
        self._types: frozenset[str] = frozenset()
        self._is_at_start = False

    def finish(self) -> list[Part]:
        """See ``PartReader``."""
        match self._state:
            case _Qwen3CoderState.WORDS | _Qwen3CoderState.MARKED | _Qwen3CoderState.NAME:
                return [Content(self._opening + self._held)]
            case _Qwen3CoderState.TEXT:
                return [CallArguments(_escaped(self._unstarted(self._held)))]
        return []

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case _Qwen3CoderState.WORDS:
                return self._find_mark(parts)
            case _Qwen3CoderState.MARKED:
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

    def _find_mark(self, parts: list[Part]) -> bool:
        marks = (BEGIN, FUNCTION, END) if self._is_open else (BEGIN, FUNCTION)
        before, mark, self._held = split_at(self._held, marks)
        parts.append(Content(before))
        if mark is None:
            return False
        self._is_open = False
        if mark != END:
            self._state = _Qwen3CoderState.MARKED if mark == BEGIN else _Qwen3CoderState.NAME
            self._opening = mark
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
        if any(mark.startswith(rest) and rest != mark for mark in (PARAMETER, FUNCTION_END)):
            return False
        if rest.startswith(PARAMETER):
            self._held, self._state = rest[len(PARAMETER) :], _Qwen3CoderState.KEY
            return True
        parts.append(CallArguments("}"))
        self._held, self._state = rest.removeprefix(FUNCTION_END), _Qwen3CoderState.WORDS
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
        before, mark, self._held = split_at(self._held, ("\n" + PARAMETER_END, PARAMETER_END))
        parts.append(CallArguments(_escaped(self._unstarted(before))))
        if mark is None:
            return False
        parts.append(CallArguments('"'))
        self._state = _Qwen3CoderState.PARAMETERS
        return True

    def _unstarted(self, text: str) -> str:
        """Text without the line break that opens a value."""
        if not self._is_at_start or not text:
            return text
        self._is_at_start = False
        return text.removeprefix("\n")

    def _give_up(self, parts: list[Part]) -> None:
        parts.append(Content(self._opening))
        self._opening, self._state = "", _Qwen3CoderState.WORDS


def _types(schema: Any) -> frozenset[str]:
    """The types that a schema names; text where it says nothing of them."""
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
