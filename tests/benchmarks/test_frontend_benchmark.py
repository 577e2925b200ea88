"""The benchmark of the frontend: its protocol, its measurements, and a minimal run."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"

CONTENDER = """
import frontends.bare as bare
from frontends.protocol import serve

bare.TOKEN_TEXT = "?"

if __name__ == "__main__":
    serve(bare.deploy, "pytest")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module, with a contender ``mumbling``, whose tokens have another text."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    process = importlib.import_module("peers.process")
    for name in ("peers", "coordinators", "frontends"):
        shutil.copytree(BENCHMARKS / name, tmp_path / "modules" / name)
    (tmp_path / "modules" / "frontends" / "mumbling.py").write_text(CONTENDER)
    monkeypatch.setattr(process, "MODULES", tmp_path / "modules")
    return importlib.import_module("frontend")


def workload(program: ModuleType, **changes: object) -> object:
    fields = {"chat": True, "streaming": False, "prompt_sentences": 1, "answer_tokens": 5}
    return program.FrontendWorkload(**{**fields, "requests": 20, "window": 3, **changes})


def test_a_turn_has_the_time_and_the_cpu_of_the_frontends_process(program: ModuleType, tmp_path: Path) -> None:
    with program.FrontendProcess("bare", tmp_path) as contender:
        turn = contender.run(workload(program))
    assert "uvicorn" in contender.versions
    assert turn.seconds > 0
    assert turn.cpu_seconds > 0


def test_a_stream_has_the_number_of_events_with_tokens(program: ModuleType, tmp_path: Path) -> None:
    with program.FrontendProcess("bare", tmp_path) as contender:
        assert contender.run(workload(program, streaming=True)).events == 20 * 5


@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_number_of_tokens_is_an_error(program: ModuleType, tmp_path: Path, streaming: bool) -> None:
    with (
        program.FrontendProcess("mumbling", tmp_path) as contender,
        pytest.raises(program.ContenderError, match="received status 200 with 0 tokens instead of 200 with 5"),
    ):
        contender.run(workload(program, streaming=streaming))


def test_a_row_compares_the_turns_of_a_pair(program: ModuleType) -> None:
    turns = {
        "ours": [program.FrontendTurn(1.0, cpu, 5000) for cpu in (0.1, 0.2, 0.3)],
        "bare": [program.FrontendTurn(2.0, cpu, 2500) for cpu in (0.4, 0.4, 0.4)],
    }
    ours, bare = program.rows("chat", workload(program, requests=1000, streaming=True), turns)
    assert ours == ["chat", "ours", "1000", "200", "40.0", "1.00", "", ""]
    assert bare == ["chat", "bare", "500", "400", "80.0", "2.00", "0.50", "0.25 to 0.75"]


def test_a_run_measures_every_workload_beside_the_bare_frontend() -> None:
    options = ["--pairs=1", "--requests=4", "--streams=4", "--stream-tokens=3", "--window=2", "--prompt-sentences=1"]
    program = [sys.executable, BENCHMARKS / "frontend.py", *options]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[4:-1]]
    assert [row[1] for row in cells] == ["ours", "bare"] * 4
    assert all(float(row[3]) > 0 for row in cells)
    assert [bool(row[4]) for row in cells] == [False] * 4 + [True] * 4
