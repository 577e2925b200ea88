"""Calls in the format of Llama 3.2, Llama 4 and ToolACE: a list of Python calls, ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

import ast
import json
import warnings
from enum import Enum, auto
from typing import Any

from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part

BEGIN = "<|python_start|>"
END = "<|python_end|>"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class _PythonicState(Enum):
    BEFORE = auto()
    LIST = auto()
    ENDING = auto()
    CONTENT = auto()


class PythonicParser:
    """A ``PartParser``. Calls are parsed only at the beginning of the text; each is emitted when it is complete."""

    def __init__(self) -> None:
        self._state = _PythonicState.BEFORE
        self._held = ""
        self._opening = ""
        self._list = _Elements()

    def push(self, text: str) -> list[Part]:
        """See ``PartParser``."""
        self._held += text
        parts: list[Part] = []
        if self._state is _PythonicState.BEFORE:
            self._find_list()
        if self._state is _PythonicState.LIST:
            parts += self._go_on()
        if self._state is _PythonicState.ENDING:
            self._find_end()
        if self._state is _PythonicState.CONTENT:
            parts.append(Content(self._held))
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """See ``PartParser``."""
        return [Content(self._opening + self._list.text + self._held)]

    def _find_list(self) -> None:
        rest = self._held.lstrip()
        if BEGIN.startswith(rest):
            return
        rest = rest.removeprefix(BEGIN).lstrip()
        if rest.startswith("["):
            self._opening, self._held = self._held[: len(self._held) - len(rest) + 1], rest[1:]
            self._state = _PythonicState.LIST
        elif rest:
            self._state = _PythonicState.CONTENT

    def _find_end(self) -> None:
        rest = self._held.lstrip()
        if not END.startswith(rest) or rest == END:
            self._held = rest.removeprefix(END)
            self._state = _PythonicState.CONTENT

    def _go_on(self) -> list[Part]:
        parts: list[Part] = []
        for at, char in enumerate(self._held):
            if not self._list.push(char):
                continue
            call = _call(self._list.element)
            is_end = char == "]"
            if call is not None:
                parts += call
                self._opening = ""
            elif not (is_end and not self._opening and not self._list.element):
                self._state, self._held = _PythonicState.CONTENT, self._opening + self._list.text + self._held[at + 1 :]
                self._opening = ""
                self._list.clear()
                return parts
            self._list.clear()
            if is_end:
                self._state, self._held = _PythonicState.ENDING, self._held[at + 1 :]
                return parts
        self._held = ""
        return parts


class _Elements:
    """Splits the content of a list into its elements."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    @property
    def text(self) -> str:
        """The current element, with the character that ended it."""
        return "".join(self._pieces)

    @property
    def element(self) -> str:
        """The last complete element."""
        return self.text[:-1].strip()

    def push(self, char: str) -> bool:
        """Adds a character; returns whether it ends an element (a comma or the end of the list)."""
        self._pieces.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}" and self._depth:
            self._depth -= 1
        else:
            return self._depth == 0 and char in ",]"
        return False

    def clear(self) -> None:
        """Begins the next element."""
        self._pieces = []


def _call(source: str) -> list[Part] | None:
    """The parts of a Python call expression; None for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(source, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(word.arg is None for word in tree.keywords):
            return None
        arguments = {word.arg: _value(word.value) for word in tree.keywords}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return [CallStart(ast.unparse(tree.func)), CallArguments(text)]


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    return ast.literal_eval(node)
