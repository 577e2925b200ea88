"""The command line."""

from __future__ import annotations

import subprocess
import sys


def test_help_needs_no_kubernetes_client() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from megatron_operator.cli import app; "
        "out = CliRunner().invoke(app, ['--help']).output; print(out); "
        "print(sorted({'kubernetes', 'kopf', 'aiohttp', 'httpx', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("describe", "logs", "pause", "start", "local", "run"):
        assert f" {command} " in done.stdout
