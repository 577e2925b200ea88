"""Format of function calls, for ``guides.calls_grammar``; without the import of llguidance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """Format of a model's function calls: each is a JSON object with a ``name``, between delimiters."""

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

    @property
    def marker(self) -> str:
        """The text that distinguishes calls from content; empty if there is none."""
        return self.opening or self.begin
