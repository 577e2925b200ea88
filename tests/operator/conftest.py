"""Puts planning_support on the path, which pytest's importlib mode does not."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))
