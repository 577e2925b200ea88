"""Calls in the format of Llama 3.2, Llama 4, Gemma 3 and ToolACE: a list of Python calls, ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part

BEGIN = "<|python_start|>"
END = "<|python_end|>"
FENCE = "```"
_JSON_NAMES = {"true": True, "false": False, "null": None}
_FENCED = re.compile(r"```(?:tool_code|python|json)?[ \t]*\r?\n\s*")
_BEFORE_FENCED = re.compile(r"`{1,3}|```[a-z_]{1,9}[ \t\r]*|```(?:tool_code|python|json)?[ \t]*\r?\n\s*")
_PRINTED = re.compile(r"^print\((.*)\)$")
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")


class _PythonicState(Enum):
    BEFORE = auto()
    LIST = auto()
    LINES = auto()
    ENDING = auto()
    CONTENT = auto()


class PythonicParser:
    """A ``PartParser``. Calls are parsed only at the beginning of the text; each is emitted when it is complete.

    Args:
        may_be_fenced: Whether the calls may be a code block in Markdown, also as lines instead of a list.
    """

    def __init__(self, *, may_be_fenced: bool = False) -> None:
        self._may_be_fenced = may_be_fenced
        self._end = END
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
        if self._state is _PythonicState.LINES:
            parts += self._read_lines()
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
        if BEGIN.startswith(rest) or (self._may_be_fenced and _BEFORE_FENCED.fullmatch(rest)):
            return
        fenced = _FENCED.match(rest) if self._may_be_fenced else None
        if fenced is not None:
            rest, self._end = rest[fenced.end() :], FENCE
        rest = rest.removeprefix(BEGIN).lstrip()
        if rest.startswith("["):
            self._opening, self._held = self._held[: len(self._held) - len(rest) + 1], rest[1:]
            self._state = _PythonicState.LIST
        elif fenced is not None:
            self._opening, self._held = self._held[: len(self._held) - len(rest)], rest
            self._state = _PythonicState.LINES
        elif rest:
            self._state = _PythonicState.CONTENT

    def _read_lines(self) -> list[Part]:
        """Reads a code block with one call per line, once it is complete."""
        block, end, rest = self._held.partition(FENCE)
        if not end:
            return []
        self._state = _PythonicState.CONTENT
        calls = [_call(_PRINTED.sub(r"\1", line.strip())) for line in block.splitlines() if line.strip()]
        if not calls or None in calls:
            self._held, self._opening = self._opening + self._held, ""
            return []
        self._held, self._opening = rest, ""
        return [part for call in calls for part in call or ()]

    def _find_end(self) -> None:
        rest = self._held.lstrip()
        if not self._end.startswith(rest) or rest == self._end:
            self._held = rest.removeprefix(self._end)
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
    name = _NAME.match(source)
    if name is None:
        return None
    # Names of functions may have characters that Python's have not.
    source = f"f{source[name.end() - 1 :]}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(source, mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
            return None
        if tree.args or any(word.arg is None for word in tree.keywords):
            return None
        arguments = {word.arg: _value(word.value, source) for word in tree.keywords}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return [CallStart(name[1]), CallArguments(text)]


def _value(node: ast.expr, source: str) -> Any:
    for inner in _strings_in_json(node, source):
        inner.value = json.loads(ast.get_source_segment(source, inner) or "")
    return ast.literal_eval(_JsonNames().visit(node))


def _strings_in_json(node: ast.expr, source: str) -> Iterator[ast.Constant]:
    """The strings with escapes of JSON that Python reads differently."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            text = ast.get_source_segment(source, inner) or ""
            if "\\" in text and _is_json(text):
                yield inner


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class _JsonNames(ast.NodeTransformer):
    """Replaces the constants of JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
