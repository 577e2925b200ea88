"""Paths of the tests with peers in environments of their own."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[1] / "cluster"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # for peer_support and cluster_support; pytest's importlib mode does not add them
