"""The benchmark of the processes of pods: a minimal run with two kills."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SEED = 2
"""With it a rank and a coordinator are killed, and none is stopped, which could take a minute."""


@pytest.mark.timeout(600)
def test_a_run_prints_what_clients_waited_for_and_fails_beyond_the_limit_alone() -> None:
    options = ["--layout=replicas", "--jobs=30", "--harms=2", "--seconds=2", "--load=9", f"--seed={SEED}"]
    program = [sys.executable, BENCHMARKS / "endurance.py", *options, "--max-wait=-1"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    defects = [line for line in done.stderr.splitlines() if line.startswith("replicas: ")]
    assert len(defects) == 1
    assert re.fullmatch(r"replicas: p99 is \d+\.\d s; the limit is -1", defects[0])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    row = dict(zip(rows[0], rows[2], strict=True))
    assert (row["replica groups"], row["kills"], row["stalls"], row["reconnections"]) == ("replicas", "2", "0", "0")
    assert int(row["requests"]) % 100 == 0
    assert float(row["longest, s"]) >= float(row["p99, s"]) >= float(row["p50, s"]) > 0
