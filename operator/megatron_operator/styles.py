"""The colours of the words that people watch: phases, states of the engine, conditions."""

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
    """The word in its colour; one that has none is a state on the way to another."""
    return Text(word, style=STYLES.get(word, TRANSITION_STYLE))
