"""The benchmark of the stages of a pass: a minimal run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

STAGES = Path(__file__).parent.parent.parent / "benchmarks" / "stages.py"


def table(options: str) -> list[list[str]]:
    """The cells of a run with the tiny model."""
    program = [sys.executable, str(STAGES), *f"{options} --model tiny --rounds 1 --threads 1 --dtype float32".split()]
    lines = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = lines[next(number for number, line in enumerate(lines) if line.startswith("| ---")) + 1 :]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def test_prompts_of_several_passes_that_never_decode_together_have_one_row() -> None:
    assert [cells[0] for cells in table("--prompts 3 --prompt-tokens 600 --new-tokens 1")] == ["1024 tokens of prompts"]


def test_the_stages_of_a_pass_add_up_to_the_whole() -> None:
    prompts, decode = table("--prompts 4 --prompt-tokens 16 --new-tokens 8")
    assert (prompts[:2], decode[:2]) == (["64 tokens of prompts", "1"], ["4 next tokens", "7"])
    for cells in (prompts, decode):
        whole, *stages, repeated = map(float, cells[2:])
        assert len(stages) == 5
        assert min(*stages, repeated) > 0
        assert abs(whole - sum(stages)) < 0.1
