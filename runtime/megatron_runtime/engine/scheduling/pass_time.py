"""Expects the time of a pass from the latest ones."""

from __future__ import annotations

_FADING = 0.95
"""Weight of a pass relative to the next one."""
_LARGEST_SURPRISE = 3.0
_SMALLEST_SPREAD = 1e-9


class PassTime:
    """The time of a pass as a linear function of its rows: least squares over the latest passes.

    The first pass does not count, because it may compile kernels. A single slow one counts as three expected ones at
    most, but the next one in full. Passes with equal numbers of rows say nothing about the time of a row; once others
    are long ago, it is expected to be 0.
    """

    def __init__(self) -> None:
        self._has_begun = self._was_slow = False
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a pass counts."""
        return self._weight > 0

    def note(self, rows: int, seconds: float) -> None:
        """Note a pass of so many rows."""
        if not self._has_begun:
            self._has_begun = True
            return
        longest = _LARGEST_SURPRISE * self.of(rows)
        is_slow = seconds > longest > 0
        if is_slow and not self._was_slow:
            seconds = longest
        self._was_slow = is_slow
        self._weight = self._weight * _FADING + 1
        self._rows = self._rows * _FADING + rows
        self._seconds = self._seconds * _FADING + seconds
        self._squares = self._squares * _FADING + rows * rows
        self._products = self._products * _FADING + rows * seconds

    def of(self, rows: int) -> float:
        """Expected seconds of a pass; 0 if no pass is known."""
        if not self.is_known:
            return 0.0
        spread = self._weight * self._squares - self._rows**2
        slope = 0.0
        if spread > _SMALLEST_SPREAD * self._rows**2:
            slope = (self._weight * self._products - self._rows * self._seconds) / spread
        slope = min(max(slope, 0.0), self._seconds / self._rows)
        return (self._seconds + slope * (rows * self._weight - self._rows)) / self._weight
