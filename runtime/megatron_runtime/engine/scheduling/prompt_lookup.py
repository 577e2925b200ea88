"""Proposes the next tokens of a sequence from its earlier tokens."""

from __future__ import annotations

from array import array

from megatron_runtime.engine.scheduling.draft_length import DraftLength

_MATCHED = (4, 2)
"""Numbers of last tokens that are looked up, one after the other."""
_BYTES = 4
_MOST_SEARCHES = 4


class PromptLookup(DraftLength):
    """Drafts the tokens that followed the last occurrence of the sequence's last tokens (prompt lookup decoding,
    Saxena 2023).

    Answers that quote, edit or continue their prompt repeat long parts of it.

    Args:
        most: Most tokens of a draft.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._known = bytearray()

    def propose(self, tokens: list[int], limit: int) -> tuple[int, ...]:
        """At most ``limit`` tokens that may follow all ``tokens``, which are those of the last call and further
        ones."""
        count = self.within(limit)
        if not count:
            return ()
        self._known += array("i", tokens[len(self._known) // _BYTES :]).tobytes()
        start = next((place for size in _MATCHED if (place := self._find(size)) is not None), None)
        if start is None:
            return ()
        period = len(tokens) - start  # The drafts repeat it, as in LZ77, if they are longer.
        return tuple(tokens[start + place % period] for place in range(count))

    def _find(self, size: int) -> int | None:
        """The index after the last earlier occurrence of the last ``size`` tokens."""
        last, end = self._known[-size * _BYTES :], len(self._known) - _BYTES
        for _ in range(_MOST_SEARCHES):
            place = self._known.rfind(last, 0, end)
            if place < 0 or len(last) < size * _BYTES:
                return None
            if place % _BYTES == 0:
                return place // _BYTES + size
            end = place + len(last) - 1  # These bytes belong to other tokens.
        return None
