"""Console output of the commands: plain lines, and the program's name for hints that can be copied."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

OPERATOR = "megatron-operator"
PLUGIN = "kubectl megatron"
PLUGIN_FILE = "kubectl-megatron"
"""File name by which kubectl finds the plugin."""


def program() -> str:
    """``megatron-operator``, or ``kubectl megatron`` when the program runs as a kubectl plugin."""
    return PLUGIN if Path(sys.argv[0]).stem == PLUGIN_FILE else OPERATOR


def say(console: Console, line: str | Text) -> None:
    """Print one line without wrapping or markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
