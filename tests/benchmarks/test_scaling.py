"""The benchmark of ranks and scheduling: its measurements, and a minimal run."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_runtime.parallel.single_rank import SingleRank

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scaling")


@pytest.mark.usefixtures("program")
def test_time_is_measured_between_the_begin_and_the_end_of_a_turn() -> None:
    timed = importlib.import_module("ranks.timed_ranks")
    results: list[dict[str, float]] = []

    class SlowRank(SingleRank):
        def least(self, number: int) -> int:
            time.sleep(0.01)
            return number

    ranks = timed.TimedRanks(SlowRank(3), results.append)
    assert ranks.position.replica_group == 3
    ranks.least(5)
    ranks.barrier(timed.BEGIN)
    assert ranks.least(5) == 5
    assert ranks.share_outcome(b"it", checksum=1).wait() == b"it"
    ranks.barrier(timed.END)
    assert set(results[0]) == {"least", "share_outcome"}
    assert results[0]["least"] >= 0.01


def test_a_row_compares_the_turns_of_a_round(program: ModuleType) -> None:
    def turn(seconds: float, *communication: dict[str, float]) -> Any:
        return program.GroupTurn(seconds, [[1, 2], [3, 4]], list(communication))

    @dataclass(frozen=True)
    class Named:
        name: str
        threads: int

    slow, quick = ({"sum": 0.5}, {"sum": 0.25, "gather": 0.25}), ({"sum": 0.1}, {"sum": 0.1})
    table = program.rows(
        {
            Named("1", 2): [turn(1.0, {}), turn(2.0, {})],
            Named("tensor 2", 1): [turn(2.0, *slow), turn(1.0, *quick)],
        }
    )
    assert table[0] == ["1", "2", "3", "", "", "0%", "", ""]
    assert table[1] == ["tensor 2", "1", "3", "1.25", "0.50 to 2.00", "18%", "sum", "100%"]


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_calls_per_token_do_not_grow_with_the_requests_in_flight(
    program: ModuleType, tmp_path: Path, prefix_caching: bool
) -> None:
    program.write_checkpoint(tmp_path, "tiny")
    found = {}
    for requests in (16, 64, 256):
        load = program.scheduling.InFlight(tmp_path, requests, 2, prefix_caching=prefix_caching)
        found[requests] = calls_of(lambda load=load: load.seconds(2)) / requests
    assert found[256] <= found[64] <= found[16]


def calls_of(act: Callable[[], object]) -> int:
    """The number of function calls, including C functions."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("text", ["expert=2", "tensor", "tensor=0"])
def test_invalid_sizes_of_a_group_are_refused(program: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        program.sizes_of(text)
    assert program.sizes_of("tensor=2,pipeline=4") == {"tensor": 2, "pipeline": 4}


def test_a_run_measures_scheduling_and_ranks() -> None:
    small = "--model tiny --rounds 1 --requests 2 --prompt-tokens 4 --new-tokens 3 --most-in-flight 4 --steps 2"
    program = [sys.executable, BENCHMARKS / "scaling.py", *small.split(), "--group", "tensor=2"]
    # torch resolves the names of addresses; without an answer, the default timeout of 5 seconds makes the test slow.
    environment = os.environ | {"RES_OPTIONS": "timeout:1 attempts:1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    assert [row[0] for row in cells if row[0].isdecimal()] == ["1", "4", "1", "4", "1"]
    name, threads, speed, *_, same = cells[-1]
    assert (name, int(threads) > 0, float(speed) > 0, same) == ("tensor 2", True, True, "100%")
