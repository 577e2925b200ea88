"""Tokens per second from a counter that is read repeatedly."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 5.0


class TokenRate:
    """The rate over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, tokens: int) -> float:
        """Adds a reading at the time ``now``, in seconds; returns tokens per second. A decrease starts again."""
        if self._samples and tokens < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, tokens))
        while now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()
        first, count = self._samples[0]
        return (tokens - count) / (now - first) if now > first else 0.0
