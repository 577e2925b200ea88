"""Sizes of memory as text."""

from __future__ import annotations

_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def size_text(size: int) -> str:
    """A number of bytes in the largest unit of which it has at least one, with three digits."""
    sign, left, unit = "-" if size < 0 else "", float(abs(size)), 0
    while left >= 1024 and unit < len(_UNITS) - 1:
        left, unit = left / 1024, unit + 1
    return f"{sign}{left:.3g} {_UNITS[unit]}" if left < 1000 else f"{sign}{left:.0f} {_UNITS[unit]}"
