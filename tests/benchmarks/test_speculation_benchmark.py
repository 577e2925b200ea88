"""The benchmark of speculation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "speculation.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With more layers than a draft model of its first two, and the channels of one that continues copies."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("speculation"), longest=2048, layers=3, hidden=256)


@pytest.mark.parametrize("draft", [(), ("--draft-model", "layers:2"), ("--draft-model", "copies")], ids=str)
def test_it_prints_a_row_for_each_kind_of_answer(model: Path, draft: tuple[str, ...]) -> None:
    command = [sys.executable, PROGRAM, "--model", model, "--pairs", "1", "--new", "8", "--threads", "1", *draft]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    assert [row[0].strip("| ").split(",")[0] for row in rows[2:]] == ["repeats its prompt"] * 2 + ["repeats nothing"]
    assert all(float(row[1]) > 0 for row in rows[2:])
