"""The benchmark of the operator, with minimal settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fleet.py"


def tables(output: str) -> list[list[dict[str, str]]]:
    """The rows of each Markdown table, by column."""
    found: list[list[dict[str, str]]] = []
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in output.splitlines()]
    header: list[str] = []
    for line, following in zip(lines, [*lines[1:], []], strict=True):
        if following and set("".join(following)) == {"-"}:
            header = line
            found.append([])
        elif set("".join(line)) != {"-"}:
            found[-1].append(dict(zip(header, line, strict=True)))
    return found


@pytest.mark.cluster
def test_a_run_measures_the_time_to_pods_the_idle_load_and_waiting_resources() -> None:
    options = ["--resources=1", "--resources=3", "--waiting=2", "--idle-seconds=6"]
    done = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    running, waiting = tables(done.stdout)
    assert [row["resources"] for row in running] == ["1", "3"]
    for row in running:
        assert float(row["to first pod, s: p50"]) <= float(row["all ready, s"])
    assert [row["waiting for nodes"] for row in waiting] == ["2"]
    for row in [*running, *waiting]:
        assert 5 < float(row["API calls per resource"]) < 60
        # Seven watches restart together every 70 s, and Jobs are listed each minute: at most 8 calls in these 6 s.
        assert float(row["idle: calls/min"]) <= 80
