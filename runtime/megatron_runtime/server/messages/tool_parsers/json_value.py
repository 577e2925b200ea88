"""Finds the end of a JSON value, character by character."""

from __future__ import annotations

_SPACE = " \t\r\n"
_SCALAR = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-._")


class JsonValue:
    """One value. It finds the end of the value but does not validate it."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_closed = False
        """Whether only white space may follow."""

    @property
    def text(self) -> str:
        """The value so far, without surrounding white space."""
        return "".join(self._pieces)

    def push(self, char: str) -> str | None:
        """The text that a character adds to the value, empty for surrounding white space; None if the value has
        ended."""
        if self._in_string:
            self._push_in_string(char)
        elif char in _SPACE:
            if self._depth == 0:
                self.is_closed = self.is_closed or bool(self._pieces)
                return ""
        elif self.is_closed or not self._fits(char):
            return None
        self._pieces.append(char)
        return char

    def _push_in_string(self, char: str) -> None:
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
