"""The benchmark of the host's time of a decode step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "bookkeeping.py"


def test_it_prints_a_row_for_each_number_of_requests() -> None:
    command = [sys.executable, PROGRAM, "--requests", "1", "3", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    assert [row[0].strip("| ") for row in rows[2:]] == ["1", "3"]
    assert all(len(row) == 5 for row in rows)


def test_all_kinds_of_requests_have_the_limit() -> None:
    """Also those with penalties."""
    lines = ("import bookkeeping, sys", "bookkeeping.LIMIT = 0", "sys.exit(bookkeeping.main())")
    command = [sys.executable, "-c", "\n".join(lines), "--requests", "1", "--steps", "1", "--rounds", "1"]
    done = subprocess.run(command, cwd=PROGRAM.parent, capture_output=True, text=True, check=False, timeout=300)
    kinds = "greedy, sampled, streamed, sampled, streamed, penalized, all penalties"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, f"more than 0 ms with 1 requests: {kinds}")
