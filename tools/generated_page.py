"""The command line of the programs that generate a page of the documentation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(page: Path, text: Callable[[], str], description: str) -> None:
    """Writes the page; with ``--check`` only fails if it is out of date. Both relative to the repository's root."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    if not parser.parse_args().check:
        page.write_text(text())
    elif not page.exists() or page.read_text() != text():
        sys.exit(f"{page}: out of date; run: make crd")
