"""How many tokens to draft for a sequence."""

from __future__ import annotations

_FAILURES_TO_PAUSE = 4
_LONGEST_PAUSE = 32


class DraftLength:
    """The number of drafts doubles when all are accepted. Else it falls by half, but not below the accepted ones and
    one more.

    After four times without an accepted draft there are none for a while, which doubles each time. So a sequence whose
    drafts are always wrong has about one draft in 32 passes.

    Args:
        most: Most tokens of a draft.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = most
        self._failures = self._pause = 0
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
            self._length = min(2 * self._length, self._most)
        else:
            self._length = max(num_accepted + 1, self._length // 2)
        if num_accepted:
            self._failures = self._pause = 0
            return
        self._failures += 1
        if self._failures >= _FAILURES_TO_PAUSE:
            self._pause = min(max(2 * self._pause, 1), _LONGEST_PAUSE)
