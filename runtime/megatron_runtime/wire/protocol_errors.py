"""Counts dropped messages, and logs them at a limited rate."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable

from megatron_runtime.wire.codec import MalformedMessage

logger = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
MAX_KINDS = 256


class ProtocolErrors:
    """Dropped messages by kind. A kind is a fixed short text that never repeats the content of a message."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_until: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, failure: Exception | None = None) -> None:
        """Count a message, and log it unless this kind was logged within the last 10 seconds.

        Of a ``failure`` the log has the type and the stack, but not the text, which may quote the message.
        """
        if kind not in self.counts and len(self.counts) >= MAX_KINDS:
            kind = "other"
        self.counts[kind] += 1
        now = self._clock()
        if now >= self._silent_until.get(kind, now):
            self._silent_until[kind] = now + QUIET_SECONDS
            where = "" if failure is None else f": {type(failure).__name__}\n{_frames(failure)}"
            logger.warning("dropped a message: %s (%d so far)%s", kind, self.counts[kind], where)

    def add_stored(self, what: str, defect: Exception) -> None:
        """Count content that was kept and can't be used: by its defect, or with the failure that it caused."""
        if isinstance(defect, MalformedMessage):
            self.add(f"{what}: {defect}")
        else:
            self.add(what, defect)

    def total(self) -> int:
        """Number of dropped messages."""
        return self.counts.total()


def _frames(failure: Exception) -> str:
    return "".join(traceback.format_tb(failure.__traceback__)).rstrip()
