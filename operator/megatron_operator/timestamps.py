"""Times and ages in the formats of Kubernetes and kubectl."""

from __future__ import annotations

from datetime import UTC, datetime

MINUTE, HOUR, DAY = 60, 3600, 86400


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, whole seconds: ``2026-11-21T10:39:27Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Seconds since the epoch. Raises ValueError when ``text`` is no RFC 3339 time."""
    return datetime.fromisoformat(text).timestamp()


def soon(seconds: float, now: float) -> str:
    """A later time for messages: ``10:39:27 UTC``, and with its date if it is not within a day."""
    if seconds - now < DAY:
        return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S UTC")
    return timestamp(seconds)


def age(seconds: float) -> str:
    """Age as kubectl prints it: ``45s``, ``3m20s``, ``12m``, ``5h10m``, ``23h``, ``4d``."""
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
