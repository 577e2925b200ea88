"""The benchmark of the stages of a pass: a minimal run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STAGES = Path(__file__).parent.parent.parent / "benchmarks" / "stages.py"


def test_the_stages_of_a_pass_add_up_to_the_whole() -> None:
    options = "--model tiny --prompts 4 --prompt-tokens 16 --new-tokens 8 --rounds 1 --threads 1 --dtype float32"
    program = [sys.executable, str(STAGES), *options.split()]
    lines = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    prompts, decode = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[-2:])
    assert (prompts[:2], decode[:2]) == (["64 tokens of prompts", "1"], ["4 next tokens", "7"])
    for cells in (prompts, decode):
        whole, *stages, repeated = map(float, cells[2:])
        assert len(stages) == 5
        assert min(*stages, repeated) > 0
        assert abs(whole - sum(stages)) < 0.1
