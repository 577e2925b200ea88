"""The benchmark of startup: a minimal run, and a peer that does not start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
STAGES = 8


def run(*options: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, BENCHMARKS / "startup.py", "--rounds=1", "--threads=1", "--model=tiny", *options]
    return subprocess.run(program, capture_output=True, text=True)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_run_prints_every_stage_of_ours_and_the_time_to_the_first_answer() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    stages = {name: float(least) for name, _, least, _ in map(cells, lines[2 : 2 + STAGES])}
    in_order = ["ranks started", "load begins", "weights read", "engine built", "ready", "first answer"]
    assert [stages[name] for name in in_order] == sorted(stages[name] for name in in_order)
    assert stages["checkpoint inspected"] < stages["load begins"]
    assert stages["frontend listens"] < stages["first answer"]
    (row,) = (cells(line) for line in lines if line.startswith("| ours"))
    assert float(row[2]) >= float(row[3]) > 0
    assert "torch 2." in row[-1]


def test_a_peer_that_cannot_be_started_ends_the_run_with_exit_code_1() -> None:
    done = run(f"--peer=llama-cpp={sys.executable}")
    assert done.returncode == 1
    assert "llama-cpp: " in done.stderr
    assert "llama-cpp-python" in done.stderr
