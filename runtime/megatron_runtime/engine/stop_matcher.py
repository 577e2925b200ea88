"""Finds stop strings in an answer that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several stop strings in a growing text, independent of token boundaries.

    Args:
        stops: Non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self.text = ""
        self._ends: list[int] = []
        self.match: tuple[int, int] | None = None
        """Start and end of the first stop string in ``text``, or None."""

    def push(self, new_text: str, *, may_match: bool = True) -> bool:
        """Add the text of the next token, which may be empty; True if there is a stop string.

        With ``may_match=False``, a stop string that ends in the new text is ignored, also later.
        """
        known = len(self.text)
        self.text += new_text
        self._ends.append(len(self.text))
        if may_match and self.match is None and new_text:
            self.match = self._first_match(known)
        return self.match is not None

    def tokens_before(self, end: int) -> int:
        """The number of leading tokens that end at or before this position of the text.

        Tokens at the boundary that completed no character do not count: their bytes may belong to the next character.
        """
        count = len(self._ends)
        while count and self._ends[count - 1] > end:
            count -= 1
        while count and self._ends[count - 1] == (self._ends[count - 2] if count > 1 else 0):
            count -= 1
        return count

    def safe_tokens(self) -> int:
        """The number of leading tokens that can't be part of a stop string, whatever tokens follow."""
        if self.match is not None:
            return self.tokens_before(self.match[0])
        return self.tokens_before(len(self.text) - self._possible_start())

    def _first_match(self, known: int) -> tuple[int, int] | None:
        """The leftmost stop string that ends after this position."""
        starts = ((self.text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in self._stops)
        return min(((start, start + length) for start, length in starts if start >= 0), default=None)

    def _possible_start(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        tail = self.text[-self._longest :]
        for length in range(min(self._longest - 1, len(tail)), 0, -1):
            if any(stop.startswith(tail[-length:]) for stop in self._stops):
                return length
        return 0
