"""Seconds since the epoch, as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC, whole seconds: ``2026-11-21T10:39:27Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Seconds since the epoch. Raises ValueError when ``text`` is no RFC 3339 time."""
    return datetime.fromisoformat(text).timestamp()


def time_of_day(seconds: float) -> str:
    """For messages: ``10:39:27 UTC``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S UTC")
