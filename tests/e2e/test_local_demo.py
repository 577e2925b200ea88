"""The demo of `make demo`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.model


def run_demo(models: Path) -> subprocess.CompletedProcess[str]:
    sample = ROOT / "manifests/samples/smollm2.yaml"
    command = [sys.executable, str(ROOT / "examples/demo.py"), str(sample), "--map-path", f"/models={models}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


def test_the_demo_succeeds(smollm2_path: Path) -> None:
    done = run_demo(smollm2_path.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "processes have ended; the demo succeeded" in done.stdout


def test_a_demo_that_cannot_be_served_fails_with_the_cause(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert done.returncode == 2
    assert "demo: FAILED" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
