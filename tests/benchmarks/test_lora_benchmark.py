"""The benchmark of the cost of LoRA adapters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "lora.py"


def test_it_prints_a_row_for_each_number_of_requests_and_phase() -> None:
    small = ["--model", "tiny", "--requests", "1", "3", "--pairs", "1", "--new-tokens", "3", "--prompt-tokens", "8"]
    command = [sys.executable, PROGRAM, *small, "--adapters", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows[3:]] == [[n, phase] for n in ("1", "3") for phase in ("prompts", "decode")]
    assert all(len(row) == 6 for row in rows[3:])
