"""Finds markers in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


def split_at(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """Text before the first of these markers, the marker, and the rest.

    If there is no marker, it is None and the rest is the longest suffix that may become a marker with more text.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    kept = max(begun_length(text, marker) for marker in markers)
    return text[: len(text) - kept], None, text[len(text) - kept :]


def begun_length(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that is an incomplete marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
