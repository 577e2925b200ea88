"""The benchmark of attacks: a minimal run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_a_run_prints_what_a_client_noticed_of_an_attack_and_what_it_took() -> None:
    endless = "header without an end, control API"
    chosen = [f"--only={name}" for name in ("expression that repeats", endless)]
    options = ["--model=tiny", "--threads=1", "--seconds=2", *chosen]
    done = subprocess.run([sys.executable, BENCHMARKS / "attacks.py", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    names = rows[0]
    found = {row[0]: dict(zip(names, row, strict=True)) for row in rows[2:]}
    assert list(found) == ["expression that repeats", endless]
    assert "x 431" in found[endless]["statuses"]
    for row in found.values():
        assert (row["wrong answers"], row["processes ended"]) == ("0", "0")
        assert float(row["p99, s"]) >= float(row["p50, s"]) > 0
        assert " x " in row["statuses"]
        assert float(row["growth / bodies"]) >= 0
