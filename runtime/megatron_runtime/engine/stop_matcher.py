"""Finding stop texts in an answer that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches a growing text for the first of several stop texts, wherever the tokens' borders fall.

    Args:
        stops: Non-empty texts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop text would match everywhere"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self.text = ""
        self._ends: list[int] = []
        self.match: tuple[int, int] | None = None
        """Start and end of the first stop text in ``text``, once there is one."""

    def push(self, new_text: str, *, may_match: bool = True) -> bool:
        """Add the text that one more token completed, which may be empty; True if a stop text is there.

        A stop text that ends in text that may not match is passed over, now and later.
        """
        known = len(self.text)
        self.text += new_text
        self._ends.append(len(self.text))
        if may_match and self.match is None and new_text:
            self.match = self._first_match(known)
        return self.match is not None

    def tokens_before(self, end: int) -> int:
        """How many leading tokens end at or before this place of the text.

        Tokens at the border that completed no character are not counted: their bytes may belong to what follows.
        """
        count = len(self._ends)
        while count and self._ends[count - 1] > end:
            count -= 1
        while count and self._ends[count - 1] == (self._ends[count - 2] if count > 1 else 0):
            count -= 1
        return count

    def safe_tokens(self) -> int:
        """How many leading tokens can't be part of a stop text, whatever comes next."""
        if self.match is not None:
            return self.tokens_before(self.match[0])
        return self.tokens_before(len(self.text) - self._possible_start())

    def _first_match(self, known: int) -> tuple[int, int] | None:
        """The leftmost stop text that ends after so many characters."""
        starts = ((self.text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in self._stops)
        return min(((start, start + length) for start, length in starts if start >= 0), default=None)

    def _possible_start(self) -> int:
        """Length of the longest end of the text that begins a stop text."""
        tail = self.text[-self._longest :]
        for length in range(min(self._longest - 1, len(tail)), 0, -1):
            if any(stop.startswith(tail[-length:]) for stop in self._stops):
                return length
        return 0
