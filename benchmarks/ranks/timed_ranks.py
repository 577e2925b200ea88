"""The ranks of a replica group, with measurements of their communication time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.ranks import Ranks

T = TypeVar("T")

BEGIN, END = "begin of a turn", "end of a turn"
"""The barriers between which time is measured."""


class TimedRanks:
    """Measures the seconds of all communication calls of a rank, including waiting.

    Args:
        ranks: What is counted.
        on_end: Gets the seconds of a turn by what was asked of the ranks.
    """

    def __init__(self, ranks: Ranks, on_end: Callable[[dict[str, float]], None]) -> None:
        self._ranks = ranks
        self._on_end = on_end
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def position(self) -> RankPosition:
        """As that of the ranks."""
        return self._ranks.position

    @property
    def has_logits(self) -> bool:
        """As that of the ranks."""
        return self._ranks.has_logits

    @property
    def samples_for_all(self) -> bool:
        """As in Ranks."""
        return self._ranks.samples_for_all

    def supervise(self, work: Callable[[], T], timeout: float | None = None) -> T:
        """Not counted itself: the work computes."""
        return self._ranks.supervise(work, timeout)

    def barrier(self, name: str, timeout: float | None = None) -> None:
        """Restarts the measurement at the begin of a turn, and reports it at the end."""
        if name == END:
            self._on_end(dict(self._seconds))
        self._timed("barrier", self._ranks.barrier, name, timeout)
        if name == BEGIN:
            self._seconds.clear()

    def share_outcome(self, outcome: bytes | None, *, checksum: int) -> TimedPending:
        """Its wait is counted too."""
        pending = self._timed("share_outcome", self._ranks.share_outcome, outcome, checksum=checksum)
        return TimedPending(lambda: self._timed("share_outcome", pending.wait))

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._ranks, name)
        return lambda *args, **named: self._timed(name, asked, *args, **named)

    def _timed(self, name: str, asked: Callable[..., Any], *args: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return asked(*args, **named)
        finally:
            self._seconds[name] += time.perf_counter() - started


class TimedPending:
    """A message that may still be on its way."""

    def __init__(self, wait: Callable[[], bytes]) -> None:
        self.wait = wait
