"""How long ago something was, as kubectl says it."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60, 3600, 86400


def age(seconds: float) -> str:
    """``45s``, ``3m20s``, ``12m``, ``5h10m``, ``23h``, ``4d``."""
    whole = max(0, int(seconds))
    if whole < 2 * MINUTE:
        return f"{whole}s"
    if whole < 10 * MINUTE:
        return _two(whole, MINUTE, "m", 1, "s")
    if whole < 3 * HOUR:
        return f"{whole // MINUTE}m"
    if whole < 8 * HOUR:
        return _two(whole, HOUR, "h", MINUTE, "m")
    return f"{whole // HOUR}h" if whole < 2 * DAY else f"{whole // DAY}d"


def _two(whole: int, large: int, large_name: str, small: int, small_name: str) -> str:
    rest = whole % large // small
    return f"{whole // large}{large_name}" + (f"{rest}{small_name}" if rest else "")
