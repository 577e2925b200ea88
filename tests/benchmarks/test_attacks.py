"""The benchmark of attacks: a minimal run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime_support.processes import children_of, is_alive

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"

ENDLESS = "header without an end, control API"
LARGE = "body of 70 MiB, control API"


def run(*chosen: str, limit: int) -> subprocess.CompletedProcess[str]:
    """A short run with these attacks, and with the same limit of slowness and of memory."""
    options = ["--model=tiny", "--threads=1", "--seconds=2", "--rest=2", *(f"--only={name}" for name in chosen)]
    options += [f"--max-slowdown={limit}", f"--max-growth={limit}"]
    return subprocess.run([sys.executable, BENCHMARKS / "attacks.py", *options], capture_output=True, text=True)


def test_a_run_prints_what_a_client_noticed_of_an_attack_and_what_it_took() -> None:
    done = run("expression that repeats", ENDLESS, limit=10**9)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    names = rows[0]
    found = {row[0]: dict(zip(names, row, strict=True)) for row in rows[2:]}
    assert list(found) == ["expression that repeats", ENDLESS]
    assert "x 431" in found[ENDLESS]["statuses"]
    for row in found.values():
        assert (row["wrong answers"], row["processes ended"]) == ("0", "0")
        assert float(row["p99, s"]) >= float(row["p50, s"]) > 0
        assert " x " in row["statuses"]
        assert float(row["growth / bodies"]) >= 0


def test_an_attack_that_exceeds_a_limit_fails_the_run() -> None:
    done = run(ENDLESS, LARGE, limit=-(10**9))
    assert done.returncode == 1
    defects = [line for line in done.stderr.splitlines() if "the limit is -1e+09" in line]
    assert [line.split(" is ")[0] for line in defects] == [
        f"{ENDLESS}: (p99 - step) / quiet",
        f"{LARGE}: (p99 - step) / quiet",
        f"{LARGE}: growth / bodies",
    ]


def test_a_run_that_gets_sigterm_ends_its_server() -> None:
    command = [sys.executable, BENCHMARKS / "attacks.py", "--model=tiny", "--threads=1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        launchers: list[int] = []
        while not (started := [each for launcher in launchers for each in children_of(launcher)]):
            assert run.poll() is None
            launchers = [*children_of(run.pid)]
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
    assert run.returncode != 0
    assert not any(is_alive(each) for each in [*launchers, *started])
