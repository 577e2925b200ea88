"""Prints what pip has to install for some extras of this project, one requirement a line.

`python tools/requirements.py EXTRA...`, such as `operator`. With it an image's libraries are a layer of their own,
which stays while the code changes. Standard library only.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """Those of the extras. Raises KeyError for an extra that is not there."""
    project = tomllib.loads(PYPROJECT.read_text())
    optional = project["project"]["optional-dependencies"]
    return [requirement for extra in extras for requirement in optional[extra]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
