"""Finds stop strings in an answer that grows token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron_runtime.engine.shared_values import SharedValues


class _Automaton:
    """All stop strings in one automaton (Aho and Corasick, "Efficient string matching", 1975).

    Its cost per character does not depend on the number and the length of the strings. State 0 is the start.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.match_length = [0]
        """By state: length of the longest stop string that ends here; 0 for none."""
        self.pending_length = [0]
        """By state: length of the longest end of the text that a stop string may begin with."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.match_length.append(0)
                self.pending_length.append(0)
            state = following
        self.match_length[state] = len(stop)

    def _link(self) -> None:
        waiting = deque((state, 1) for state in self._next[0].values())
        while waiting:
            state, depth = waiting.popleft()
            fallback = self._fallback[state]
            self.match_length[state] = self.match_length[state] or self.match_length[fallback]
            self.pending_length[state] = depth if self._next[state] else self.pending_length[fallback]
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(fallback, character)
                waiting.append((following, depth + 1))

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (following := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return following


_automaton = SharedValues(_Automaton)


class StopMatcher:
    """Finds the first of several stop strings in a growing text, independent of token boundaries.

    Args:
        stops: Non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._automaton = _automaton(tuple(stops))
        self._state = 0
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
        if self.match is None:
            found = self._advance(new_text, known)
            self.match = found if may_match else None
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
        return self.tokens_before(len(self.text) - self._automaton.pending_length[self._state])

    def _advance(self, new_text: str, known: int) -> tuple[int, int] | None:
        """The leftmost stop string that ends in the new text, which begins at position ``known``."""
        automaton, found = self._automaton, None
        for end, character in enumerate(new_text, known + 1):
            self._state = automaton.step(self._state, character)
            length = automaton.match_length[self._state]
            if length and (found is None or end - length < found[0]):
                found = end - length, end
        return found
