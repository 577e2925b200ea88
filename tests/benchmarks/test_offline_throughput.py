"""The benchmark of offline jobs: its protocol, and a minimal run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"

CONTENDER = """
import os
import sys

from peers.protocol import choose, serve


class Echo:
    def __init__(self, job):
        print("words of a library on stdout")
        self.job, self.kind = job, choose(job.dtype, {"float32": "f32"})

    def run(self, new_tokens):
        print("and more of them", flush=True)
        given = new_tokens - (self.job.prompts[0][0] == 666)
        return [[os.getpid()] * given for _ in self.job.prompts]


serve(Echo, "pytest")
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that runs contenders, with a contender ``echo``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers import process

    folder = tmp_path / "modules" / "peers"
    folder.mkdir(parents=True)
    shutil.copy(BENCHMARKS / "peers" / "protocol.py", folder)
    (folder / "echo.py").write_text(CONTENDER)
    monkeypatch.setattr(process, "MODULES", folder.parent)
    return process


def job(process: ModuleType, tmp_path: Path, *, first: int = 7, dtype: str = "float32") -> object:
    return process.Job(tmp_path, tmp_path / "work", dtype, 1, [[first, 8], [9, 10]], 3)


def state(pid: int) -> str:
    """The state of a process, as in /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_output_of_libraries_does_not_garble_answers(process: ModuleType, tmp_path: Path) -> None:
    with process.ContenderProcess("echo", sys.executable, job(process, tmp_path)) as contender:
        seconds, tokens = contender.run()
    assert contender.versions == {"pytest": pytest.__version__}
    assert seconds > 0
    assert [len(row) for row in tokens] == [3, 3]


def test_a_waiting_contender_is_stopped(process: ModuleType, tmp_path: Path) -> None:
    with process.ContenderProcess("echo", sys.executable, job(process, tmp_path)) as contender:
        pid = contender.run()[1][0][0]
        deadline = time.monotonic() + 10
        while state(pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(pid) == "T"
        assert contender.run()[1][0][0] == pid
    assert not Path(f"/proc/{pid}").exists()


def test_too_few_tokens_are_an_error(process: ModuleType, tmp_path: Path) -> None:
    with (
        process.ContenderProcess("echo", sys.executable, job(process, tmp_path, first=666)) as contender,
        pytest.raises(process.ContenderError, match=r"generated \[2, 2\] new tokens instead of 3"),
    ):
        contender.run()


def test_a_contender_that_ended_between_turns_is_reported_with_its_log(process: ModuleType, tmp_path: Path) -> None:
    with process.ContenderProcess("echo", sys.executable, job(process, tmp_path)) as contender:
        os.kill(contender.run()[1][0][0], signal.SIGKILL)
        contender._process.wait()
        with pytest.raises(process.ContenderError, match=r"echo ended during .run.; (.|\n)*and more of them"):
            contender.run()


def test_an_unsupported_dtype_is_refused_by_name(process: ModuleType, tmp_path: Path) -> None:
    contender = process.ContenderProcess("echo", sys.executable, job(process, tmp_path, dtype="float16"))
    with pytest.raises(process.ContenderError, match="--dtype float16 is not supported here; use one of float32"):
        contender.__enter__()


def test_a_run_prints_the_ratio_to_a_peer_and_why_another_was_not_measured() -> None:
    options = ["--model=tiny", "--prompts=3", "--prompt-tokens=8", "--new-tokens=5", "--pairs=2", "--threads=1"]
    peers = ["--peer=transformers", f"--peer=llama-cpp={sys.executable}"]
    program = [sys.executable, BENCHMARKS / "offline_throughput.py", *options, *peers]
    done = subprocess.run(program, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].endswith("1 threads, float32")
    assert [line.split(":")[0] for line in lines[1:3]] == ["pair 1", "pair 2"]
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells[0] == "transformers"
    assert float(cells[3]) > 0
    assert cells[5] == "100%"
    assert "torch 2." in cells[6]
    assert "llama-cpp ended during 'load'" in done.stderr
    assert "No module named 'llama_cpp'" in done.stderr
    assert done.returncode == 1


def test_a_gguf_file_is_refused_for_peers_that_cannot_read_it() -> None:
    program = [sys.executable, BENCHMARKS / "offline_throughput.py", "--gguf=a.gguf", "--peer=transformers"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert "--gguf a.gguf: the only peer that reads it is --peer llama-cpp=PYTHON" in done.stderr
    assert done.returncode == 2


def test_ours_and_llama_cpp_get_the_gguf_file_itself(smollm2_path: Path) -> None:
    options = [f"--gguf={smollm2_path}", "--prompts=1", "--prompt-tokens=8", "--new-tokens=3", "--threads=1"]
    program = [sys.executable, BENCHMARKS / "offline_throughput.py", *options, f"--peer=llama-cpp={sys.executable}"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.stdout.splitlines()[0].endswith("1 threads, float32")
    assert "No module named 'llama_cpp'" in done.stderr
    assert done.returncode == 1
