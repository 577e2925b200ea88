"""What the program was called as, for hints that can be typed again."""

from __future__ import annotations

import sys
from pathlib import Path

OPERATOR = "megatron-operator"
PLUGIN = "kubectl megatron"
PLUGIN_FILE = "kubectl-megatron"
"""kubectl finds its plugins by such names."""


def program() -> str:
    """``megatron-operator``, or ``kubectl megatron`` where kubectl called."""
    return PLUGIN if Path(sys.argv[0]).stem == PLUGIN_FILE else OPERATOR
