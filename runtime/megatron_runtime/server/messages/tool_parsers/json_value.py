"""Follows one JSON value, character by character, to where it ends."""

from __future__ import annotations

_SPACE = " \t\r\n"
_SCALAR = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-._")


class JsonValue:
    """One value. It is no validator: it tells where a value ends, and is strict only where a value can't go on."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_closed = False
        """Whether nothing but white space may follow."""

    @property
    def text(self) -> str:
        """The value so far, without white space around it."""
        return "".join(self._pieces)

    def take(self, char: str) -> str | None:
        """What a character adds to the value, which is nothing around it; None if it does not belong to it."""
        if self._in_string:
            self._take_in_string(char)
        elif char in _SPACE:
            if self._depth == 0:
                self.is_closed = self.is_closed or bool(self._pieces)
                return ""
        elif self.is_closed or not self._fits(char):
            return None
        self._pieces.append(char)
        return char

    def _take_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            self.is_closed = self._depth == 0

    def _fits(self, char: str) -> bool:
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                return False
            self._depth -= 1
            self.is_closed = self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in ",:":
            return self._depth > 0
        else:
            return char in _SCALAR
        return True
