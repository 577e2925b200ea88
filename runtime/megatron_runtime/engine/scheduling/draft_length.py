"""How many tokens to draft for a sequence."""

from __future__ import annotations

_LONGEST_PAUSE = 32


class DraftLength:
    """The number of drafts doubles when all are accepted, and falls to the number of accepted ones.

    After drafts without an accepted one there are none for a while, which doubles each time. So a sequence whose drafts
    are always wrong has about one draft in 32 passes.

    Args:
        most: Most tokens of a draft.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = most
        self._pause = 0
        self._skipped = 0

    def within(self, limit: int) -> int:
        """The number of drafts of the next pass, at most ``limit``."""
        if limit <= 0:
            return 0
        if self._skipped < self._pause:
            self._skipped += 1
            return 0
        return min(limit, self._length)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Note how many of the last drafts were the sampled tokens."""
        self._skipped = 0
        if num_accepted == num_drafts:
            self._length, self._pause = min(2 * self._length, self._most), 0
        elif num_accepted:
            self._length, self._pause = num_accepted, 0
        else:
            self._length, self._pause = 1, min(max(2 * self._pause, 1), _LONGEST_PAUSE)
