"""Format of function calls: for ``guides.calls_grammar`` and for prompts; without the import of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParameterFormat:
    """Format of one named argument in calls whose arguments are not a JSON object."""

    before: str
    """Before the value; ``{key}`` stands for the parameter's name."""
    after: str = ""
    """After the value."""
    separator: str = ""
    """Between two arguments."""
    has_plain_text: bool = True
    """Whether strings are plain text; otherwise every value is JSON."""
    keys: str = r'[^<>"\s]+'
    """Regular expression of the keys that can be written."""

    def text(self, key: str, value: Any) -> str:
        """One argument."""
        is_plain = self.has_plain_text and isinstance(value, str)
        return self.before.replace("{key}", key) + (value if is_plain else _json(value)) + self.after


@dataclass(frozen=True)
class CallFormat:
    """Format of a model's function calls, between delimiters.

    By default, each call is a JSON object with a ``name`` and arguments.
    """

    begin: str = ""
    """Before each call."""
    end: str = ""
    """After each call."""
    separator: str = ""
    """Between two calls."""
    opening: str = ""
    """Before the first call."""
    closing: str = ""
    """After the last call."""
    arguments: str = "arguments"
    """The key of the arguments in the JSON object."""
    head: str = ""
    """Before the arguments, if a call is not a JSON object; ``{name}`` stands for the function's name and ``{index}``
    for the number of the call."""
    tail: str = ""
    """After the arguments, if a call is not a JSON object."""
    names: str = r"[\w.:/-]+"
    """Regular expression of the names that can be written, if a call is not a JSON object."""
    parameters: ParameterFormat | None = None
    """Format of the arguments; None for a JSON object."""
    has_marker: bool = True
    """Whether the text before the first call distinguishes it from content."""
    is_single: bool = False
    """Whether an answer ends after its first call."""

    @property
    def marker(self) -> str:
        """The text that distinguishes calls from content; empty if there is none."""
        return (self.opening or self.begin) if self.has_marker else ""

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object."""
        return not self.head

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """These calls, each a name and its arguments, as the model would write them."""
        written = (self.begin + self._call(index, *call) + self.end for index, call in enumerate(calls))
        return self.opening + self.separator.join(written) + self.closing

    def _call(self, index: int, name: str, arguments: Mapping[str, Any]) -> str:
        if self.is_object:
            return _json({"name": name, self.arguments: arguments})
        head = self.head.replace("{index}", str(index)).replace("{name}", name)
        form = self.parameters
        if form is None:
            return head + _json(arguments) + self.tail
        return head + form.separator.join(form.text(key, value) for key, value in arguments.items()) + self.tail


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
