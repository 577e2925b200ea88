"""Parser for a tool call that is a JSON object with a name and arguments."""

from __future__ import annotations

import json
from enum import Enum, auto

from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Part
from megatron_runtime.server.messages.tool_parsers.json_value import JsonValue

ARGUMENT_KEYS = ("arguments", "parameters")


class _JsonCallState(Enum):
    BEFORE = auto()
    BETWEEN = auto()
    KEY = auto()
    VALUE = auto()
    AFTER = auto()


class JsonCall:
    """Parses one object. The arguments are streamed unchanged once the name is known.

    Args:
        needs_arguments: Whether an object without arguments is invalid, instead of a call without arguments.
    """

    def __init__(self, *, needs_arguments: bool = False) -> None:
        self._needs_arguments = needs_arguments
        self._state = _JsonCallState.BEFORE
        self._text: list[str] = []
        self._key = ""
        self._value = JsonValue()
        self._name: str | None = None
        self._arguments = _Arguments()
        self._has_begun = False

    @property
    def is_finished(self) -> bool:
        """Whether the object has ended."""
        return self._state is _JsonCallState.AFTER

    @property
    def is_invalid(self) -> bool:
        """Whether the object has ended and is not a call."""
        return self.is_finished and not self._has_begun

    @property
    def text(self) -> str:
        """The text of the object, which is content if it is not a call."""
        return "".join(self._text)

    def push(self, text: str) -> tuple[list[Part], str]:
        """The parts that are certain now, and the text after the object."""
        parts: list[Part] = []
        for at, char in enumerate(text):
            belongs = self._read_char(char, parts)
            if belongs:
                self._text.append(char)
            if self.is_finished:
                return parts, text[at + belongs :]
        return parts, ""

    def finish(self) -> list[Part]:
        """The remaining parts of a call at the end of the text."""
        parts: list[Part] = []
        if self._has_begun and not self.is_finished:
            self._emit_arguments(parts, is_whole=True)
        self._state = _JsonCallState.AFTER
        return parts

    def _read_char(self, char: str, parts: list[Part]) -> bool:
        """Parses a character; returns whether it belongs to the object."""
        match self._state:
            case _JsonCallState.BEFORE:
                return self._read_before(char)
            case _JsonCallState.KEY:
                return self._read_key(char)
            case _JsonCallState.VALUE:
                return self._read_value(char, parts)
        return self._read_between(char, parts)

    def _read_before(self, char: str) -> bool:
        if char == "{":
            self._state = _JsonCallState.BETWEEN
        elif not char.isspace():
            self._state = _JsonCallState.AFTER
        return not self.is_finished

    def _read_between(self, char: str, parts: list[Part]) -> bool:
        if char == '"':
            self._value = JsonValue()
            self._value.push(char)
            self._state = _JsonCallState.KEY
        elif char == "}":
            self._end(parts)
        elif not (char.isspace() or char == ","):
            self._state = _JsonCallState.AFTER
            return False
        return True

    def _read_key(self, char: str) -> bool:
        if self._value.push(char) is not None:
            return True
        key = _loaded(self._value.text)
        if char != ":" or not isinstance(key, str):
            self._state = _JsonCallState.AFTER
            return False
        self._key, self._value, self._state = key, JsonValue(), _JsonCallState.VALUE
        return True

    def _read_value(self, char: str, parts: list[Part]) -> bool:
        added = self._value.push(char)
        if added is not None:
            if self._key in ARGUMENT_KEYS:
                self._arguments.add(added)
                self._emit_arguments(parts)
            return True
        if self._key in ARGUMENT_KEYS:
            self._emit_arguments(parts, is_whole=True)
        elif self._key == "name" and self._name is None:
            name = _loaded(self._value.text)
            self._name = name if isinstance(name, str) and name else None
            self._emit_arguments(parts, is_whole=True)
        self._state = _JsonCallState.BETWEEN
        return self._read_between(char, parts)

    def _emit_arguments(self, parts: list[Part], *, is_whole: bool = False) -> None:
        if self._name is None or not self._arguments:
            return
        if not self._has_begun:
            parts.append(CallStart(self._name))
            self._has_begun = True
        if text := self._arguments.pending(is_whole=is_whole):
            parts.append(CallArguments(text))

    def _end(self, parts: list[Part]) -> None:
        self._state = _JsonCallState.AFTER
        if self._name is not None and not self._has_begun and not self._needs_arguments:
            self._has_begun = True
            parts += [CallStart(self._name), CallArguments("{}")]


class _Arguments:
    """The JSON of the arguments; some models write it as a string that contains JSON."""

    def __init__(self) -> None:
        self._first = ""
        self._pending: list[str] = []

    def __bool__(self) -> bool:
        """Whether there are arguments."""
        return bool(self._first)

    def add(self, text: str) -> None:
        """Adds characters."""
        self._first = self._first or text
        if text:
            self._pending.append(text)

    def pending(self, *, is_whole: bool) -> str:
        """The characters to emit now; a value that is neither object nor list is emitted only when complete."""
        if not is_whole and self._first not in "{[":
            return ""
        text = "".join(self._pending)
        self._pending = []
        if self._first in "{[" or not text:
            return text
        value = _loaded(text)
        if isinstance(value, str):
            return value or "{}"
        return "{}" if text == "null" else text


def _loaded(text: str) -> object:
    """The value; None for invalid JSON."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value
