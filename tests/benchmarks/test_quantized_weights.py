"""The benchmark of quantized weights: a minimal run of the part that needs no SmolLM2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent.parent.parent / "benchmarks" / "quantized_weights.py"


def test_a_random_model_is_loaded() -> None:
    options = "--part memory --random Q6_K --layers 1 --width 256 --pairs 1 --threads 1"
    program = [sys.executable, str(PROGRAM), *options.split()]
    lines = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[-2:]]
    assert [row[0] for row in cells] == ["keep", "expand"]
    kept, expanded = ([float(cell) for cell in row[1:]] for row in cells)
    assert kept[0] < expanded[0]
    assert min(kept[2], expanded[2]) > 0
