"""Connections to a coordinator that reuse the identity or the name of another one.

Usage: `identities.py ADDRESS KEY`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "runtime"))

from runtime_support.reused_identities import reuse_identities

if __name__ == "__main__":
    reuse_identities(sys.argv[1], sys.argv[2])
