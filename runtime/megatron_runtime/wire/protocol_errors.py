"""Counts what was dropped, and logs it without letting a flood of bad messages flood the log too."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
MOST_KINDS = 256


class ProtocolErrors:
    """Dropped messages by kind. A kind is a short text of ours and never repeats what a message said."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_until: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, failure: Exception | None = None) -> None:
        """Count one, and log it unless this kind was logged within the last 10 seconds.

        Of a ``failure`` of ours the log gets its type and where it happened, but not its words, which may quote what
        the message said.
        """
        if kind not in self.counts and len(self.counts) >= MOST_KINDS:
            kind = "other"
        self.counts[kind] += 1
        now = self._clock()
        if now >= self._silent_until.get(kind, now):
            self._silent_until[kind] = now + QUIET_SECONDS
            where = "" if failure is None else f": {type(failure).__name__}\n{_frames(failure)}"
            logger.warning("dropped a message: %s (%d so far)%s", kind, self.counts[kind], where)

    def total(self) -> int:
        """How many were dropped."""
        return self.counts.total()


def _frames(failure: Exception) -> str:
    return "".join(traceback.format_tb(failure.__traceback__)).rstrip()
