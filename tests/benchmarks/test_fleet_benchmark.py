"""The benchmark of the operator: one small run of it all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fleet.py"


@pytest.mark.cluster
def test_a_run_measures_the_way_to_pods_and_the_rest_afterwards() -> None:
    command = [
        sys.executable,
        BENCHMARK,
        "--resources",
        "1",
        "--resources",
        "3",
        "--waiting",
        "2",
        "--idle-seconds",
        "6",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    header, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in done.stdout.splitlines()]
    measured = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["resources"] for row in measured] == ["1", "3"]
    for row in measured:
        assert float(row["to first pod, s: p50"]) <= float(row["all ready, s"])
        assert 5 < float(row["API calls each"]) < 60
        # Five watches are begun anew now and then, all at once: 50 calls a minute, if it is in these 6 seconds.
        assert float(row["idle: calls/min"]) < 60
