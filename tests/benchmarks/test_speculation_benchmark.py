"""The benchmark of speculation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "speculation.py"


@pytest.mark.model
@pytest.mark.parametrize("draft", [(), ("--draft-model", "layers:2"), ("--draft-model", "copies")], ids=str)
def test_it_prints_a_row_for_each_kind_of_answer(smollm2_path: Path, draft: tuple[str, ...]) -> None:
    command = [sys.executable, PROGRAM, "--model", smollm2_path, "--pairs", "1", "--new", "8", "--threads", "1", *draft]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    assert [row[0].strip("| ").split(",")[0] for row in rows[2:]] == ["repeats its prompt"] * 2 + ["repeats nothing"]
    assert all(float(row[1]) > 0 for row in rows[2:])
