"""A call of a tool that the model writes as a JSON object with a name and arguments."""

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
    """Reads one object. The arguments are passed on as they are written, as soon as the name is known.

    Args:
        needs_arguments: An object without any is no call; else it is one without arguments.
    """

    def __init__(self, *, needs_arguments: bool = False) -> None:
        self._needs_arguments = needs_arguments
        self._state = _JsonCallState.BEFORE
        self._read: list[str] = []
        self._key = ""
        self._value = JsonValue()
        self._name: str | None = None
        self._arguments = _Arguments()
        self._has_begun = False

    @property
    def is_over(self) -> bool:
        """Whether nothing that follows belongs to it."""
        return self._state is _JsonCallState.AFTER

    @property
    def is_none(self) -> bool:
        """Whether it is over and was no call."""
        return self.is_over and not self._has_begun

    @property
    def text(self) -> str:
        """What was read, to be told as it is if it was no call."""
        return "".join(self._read)

    def push(self, text: str) -> tuple[list[Part], str]:
        """The parts that are certain now, and the text that does not belong to the call."""
        parts: list[Part] = []
        for at, char in enumerate(text):
            is_taken = self._take(char, parts)
            if is_taken:
                self._read.append(char)
            if self.is_over:
                return parts, text[at + is_taken :]
        return parts, ""

    def finish(self) -> list[Part]:
        """What is left of a call when the text is over."""
        parts: list[Part] = []
        if self._has_begun and not self.is_over:
            self._tell_arguments(parts, is_whole=True)
        self._state = _JsonCallState.AFTER
        return parts

    def _take(self, char: str, parts: list[Part]) -> bool:
        """Whether the character belongs to the object."""
        match self._state:
            case _JsonCallState.BEFORE:
                return self._take_before(char)
            case _JsonCallState.KEY:
                return self._take_key(char)
            case _JsonCallState.VALUE:
                return self._take_value(char, parts)
        return self._take_between(char, parts)

    def _take_before(self, char: str) -> bool:
        if char == "{":
            self._state = _JsonCallState.BETWEEN
        elif not char.isspace():
            self._state = _JsonCallState.AFTER
        return not self.is_over

    def _take_between(self, char: str, parts: list[Part]) -> bool:
        if char == '"':
            self._value = JsonValue()
            self._value.take(char)
            self._state = _JsonCallState.KEY
        elif char == "}":
            self._end(parts)
        elif not (char.isspace() or char == ","):
            self._state = _JsonCallState.AFTER
            return False
        return True

    def _take_key(self, char: str) -> bool:
        if self._value.take(char) is not None:
            return True
        key = _loaded(self._value.text)
        if char != ":" or not isinstance(key, str):
            self._state = _JsonCallState.AFTER
            return False
        self._key, self._value, self._state = key, JsonValue(), _JsonCallState.VALUE
        return True

    def _take_value(self, char: str, parts: list[Part]) -> bool:
        added = self._value.take(char)
        if added is not None:
            if self._key in ARGUMENT_KEYS:
                self._arguments.add(added)
                self._tell_arguments(parts)
            return True
        if self._key in ARGUMENT_KEYS:
            self._tell_arguments(parts, is_whole=True)
        elif self._key == "name" and self._name is None:
            name = _loaded(self._value.text)
            self._name = name if isinstance(name, str) and name else None
            self._tell_arguments(parts, is_whole=True)
        self._state = _JsonCallState.BETWEEN
        return self._take_between(char, parts)

    def _tell_arguments(self, parts: list[Part], *, is_whole: bool = False) -> None:
        if self._name is None or not self._arguments:
            return
        if not self._has_begun:
            parts.append(CallStart(self._name))
            self._has_begun = True
        if text := self._arguments.untold(is_whole=is_whole):
            parts.append(CallArguments(text))

    def _end(self, parts: list[Part]) -> None:
        self._state = _JsonCallState.AFTER
        if self._name is not None and not self._has_begun and not self._needs_arguments:
            self._has_begun = True
            parts += [CallStart(self._name), CallArguments("{}")]


class _Arguments:
    """The JSON of the arguments, which some models write as a text that holds JSON."""

    def __init__(self) -> None:
        self._first = ""
        self._untold: list[str] = []

    def __bool__(self) -> bool:
        """Whether there are any yet."""
        return bool(self._first)

    def add(self, text: str) -> None:
        """Take the next characters."""
        self._first = self._first or text
        if text:
            self._untold.append(text)

    def untold(self, *, is_whole: bool) -> str:
        """What to pass on now; what is neither object nor list only when it is whole."""
        if not is_whole and self._first not in "{[":
            return ""
        text = "".join(self._untold)
        self._untold = []
        if self._first in "{[" or not text:
            return text
        value = _loaded(text)
        if isinstance(value, str):
            return value or "{}"
        return "{}" if text == "null" else text


def _loaded(text: str) -> object:
    """The value; None for what is no JSON."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value
