"""Styles of phases, engine states and conditions on a terminal."""

from __future__ import annotations

from rich.text import Text

STYLES = {
    "Running": "green",
    "RUNNING": "green",
    "Ready": "green",
    "True": "green",
    "Failed": "bold red",
    "Degraded": "red",
    "Paused": "yellow",
    "PAUSED": "yellow",
    "Suspended": "magenta",
    "SUSPENDED": "magenta",
    "Stopped": "dim",
    "False": "dim",
    "-": "dim",
}
TRANSITION_STYLE = "cyan"


def styled(word: str) -> Text:
    """The word in its style; a word without an entry is a transitional state."""
    return Text(word, style=STYLES.get(word, TRANSITION_STYLE))
