"""Common parts of the command lines and the output of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def add_peer_option(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Adds ``--peer NAME[=PYTHON]``, which may be repeated; its value is a list of (name, python), or None."""

    def peer(text: str) -> tuple[str, str]:
        name, _, python = text.partition("=")
        if name not in names:
            raise argparse.ArgumentTypeError(f"unknown peer {name!r}; use one of {', '.join(names)}")
        return name, python or sys.executable

    parser.add_argument(
        "--peer",
        type=peer,
        action="append",
        metavar="NAME[=PYTHON]",
        help=f"repeatable: {', '.join(names)}; PYTHON: the Python of its environment, default: this one",
    )


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer; use 1 or more")
    return int(text)


def print_table(rows: list[list[str]]) -> None:
    """Prints a Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for line in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def listed(versions: dict[str, str]) -> str:
    """``name version, name version``."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())
