"""Tables as kubectl prints them: columns that are as wide as they need, and never cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from megatron_operator.colours import COLOURS, coloured

GAP = "   "


class Columns:
    """Prints rows below one another. The widths of the first rows stay, unless a later one needs more."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._names = [name.upper() for name in names]
        self._widths = [0] * len(names)
        self._titled = False

    def show(self, rows: Iterable[Sequence[str]]) -> None:
        """Prints the rows; the names of the columns come first, once."""
        listed = [list(row) for row in rows]
        if not self._titled:
            self._titled = True
            listed.insert(0, self._names)
        for row in listed:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        for row in listed:
            say(self._console, self._line(row))

    def _line(self, row: Sequence[str]) -> Text:
        line = Text()
        for cell, width in zip(row[:-1], self._widths, strict=False):
            line.append_text(_cell(cell))
            line.append(" " * (width - len(cell)) + GAP)
        return line.append_text(_cell(row[-1]))


def say(console: Console, words: str | Text) -> None:
    """Print as it is: unwrapped, and without markup."""
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def _cell(word: str) -> Text:
    return coloured(word) if word in COLOURS else Text(word)
