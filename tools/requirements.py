"""Prints the requirements of some extras of this project for pip, one per line.

`python tools/requirements.py EXTRA...`, such as `operator`. With it, the libraries are a separate layer of an image,
which is reused when only the code changes. Uses only the standard library.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """The requirements of the extras. Raises KeyError for an unknown extra."""
    project = tomllib.loads(PYPROJECT.read_text())
    optional = project["project"]["optional-dependencies"]
    return [requirement for extra in extras for requirement in optional[extra]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
