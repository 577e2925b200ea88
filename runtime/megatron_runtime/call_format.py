"""How a model writes calls of functions, for ``guides.calls_grammar``; costs nothing to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls of functions: each one is a JSON object with a ``name``, and something around it."""

    begin: str = ""
    """Before each call."""
    end: str = ""
    """After each call."""
    separator: str = ""
    """Between two."""
    opening: str = ""
    """Before all of them."""
    closing: str = ""
    """After all of them."""
    arguments: str = "arguments"
    """The key of the object with the arguments."""

    @property
    def mark(self) -> str:
        """What tells calls from words; empty where nothing does."""
        return self.opening or self.begin
