"""The benchmark of the coordinator: its protocol, its measurements, and a minimal run."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"

CONTENDER = """
import os

from coordinators.protocol import serve


class Echo:
    coordinator = os.getpid()

    async def ask(self, prompt, answer_tokens):
        return answer_tokens - (prompt[0] == 7919)


async def deploy(setup, prefix_routing):
    return Echo()


serve(deploy, "pytest")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module, with a contender ``echo``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    process = importlib.import_module("peers.process")
    for name in ("peers", "coordinators"):
        (tmp_path / "modules" / name).mkdir(parents=True)
        shutil.copy(BENCHMARKS / name / "protocol.py", tmp_path / "modules" / name)
    (tmp_path / "modules" / "coordinators" / "echo.py").write_text(CONTENDER)
    monkeypatch.setattr(process, "MODULES", tmp_path / "modules")
    return importlib.import_module("coordinator")


def workload(program: ModuleType, **changes: object) -> object:
    fields = {"prefix_routing": False, "streaming": False, "prompt_tokens": 16, "answer_tokens": 5}
    return program.CoordinatorWorkload(
        **{**fields, "requests": 20, "window": 3, "round_trips": 4, "seed": 0, **changes}
    )


def test_a_turn_has_time_cpu_and_round_trips(program: ModuleType, tmp_path: Path) -> None:
    with program.CoordinatorProcess("echo", sys.executable, program.CoordinatorSetup(4, 16), tmp_path) as contender:
        turn = contender.run(workload(program))
    assert contender.versions["pytest"] == pytest.__version__
    assert turn.seconds > 0
    assert turn.cpu_seconds > 0
    assert len(turn.round_trips) == 4


def test_a_wrong_number_of_tokens_is_an_error(program: ModuleType, tmp_path: Path) -> None:
    with (
        program.CoordinatorProcess("echo", sys.executable, program.CoordinatorSetup(4, 16), tmp_path) as contender,
        pytest.raises(program.ContenderError, match="received 4 tokens instead of 5"),
    ):
        contender.run(workload(program, seed=1))


def test_a_contender_without_streams_gets_no_streamed_requests(program: ModuleType, tmp_path: Path) -> None:
    with program.CoordinatorProcess("echo", sys.executable, program.CoordinatorSetup(4, 16), tmp_path) as contender:
        assert not contender.streams
        with pytest.raises(program.ContenderError, match="does not stream tokens"):
            contender.run(workload(program, streaming=True))


def test_the_cpu_time_of_a_process_includes_all_threads(program: ModuleType) -> None:
    protocol = importlib.import_module(program.CoordinatorWorkload.__module__)
    before = protocol.cpu_seconds(os.getpid())
    sum(range(1_000_000))
    assert protocol.cpu_seconds(os.getpid()) > before


def test_prompts_share_their_first_half_with_a_few_others_and_their_second_with_none(program: ModuleType) -> None:
    prompts = list(workload(program).prompts(24))
    assert {len(prompt) for prompt in prompts} == {16}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 3
    assert len({tuple(prompt[8:]) for prompt in prompts}) == 24


def test_a_row_compares_the_turns_of_a_pair(program: ModuleType) -> None:
    turns = {
        "ours": [program.CoordinatorTurn(1.0, cpu, [0.001, 0.002]) for cpu in (0.1, 0.2, 0.3)],
        "peer": [program.CoordinatorTurn(2.0, cpu, [0.006, 0.008]) for cpu in (0.4, 0.4, 0.4)],
    }
    ours, peer = program.rows("plain", workload(program, requests=1000), turns)
    assert ours == ["plain", "ours", "1000", "200.0", "", "1.50", "2.00", "", ""]
    assert peer == ["plain", "peer", "500", "400.0", "", "7.00", "8.00", "0.50", "0.25 to 0.75"]


def test_a_run_measures_every_workload_beside_the_forwarder() -> None:
    options = ["--pairs=1", "--requests=4", "--window=4", "--round-trips=2", "--engines=2"]
    program = [sys.executable, BENCHMARKS / "coordinator.py", *options]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[4:]]
    assert [row[1] for row in cells] == ["ours", "forwarder"] * 5
    assert all(float(row[3]) > 0 for row in cells)
    assert all(float(row[4]) > 0 for row in cells if row[0] == "streaming")
