"""The command line."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


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


@pytest.mark.parametrize(("entry", "name"), [("main", "megatron-operator"), ("plugin", "kubectl megatron")])
def test_the_version_is_printed(entry: str, name: str) -> None:
    program = name.replace(" ", "-")
    script = f"import sys; sys.argv = ['{program}', '--version']; from megatron_operator import cli; cli.{entry}()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{name} {version('megatron-inference')}\n"


@pytest.mark.parametrize("content", [None, "clusters: []", "{"])
def test_an_operator_without_a_cluster_says_so_in_one_line(tmp_path: Path, content: str | None) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    if content is not None:
        kubeconfig.write_text(content)
    environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_operator.cli", "run"],
        env={**environment, "KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    for words in ("megatron-operator: cannot start: ", str(kubeconfig), "set KUBECONFIG"):
        assert words in done.stderr


def test_an_operator_waits_for_an_api_server_with_one_line_for_each_attempt(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # It refuses connections, and no other process gets the port.
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        context = {"name": "gone", "context": {"cluster": "gone", "user": "gone"}}
        kubeconfig = {
            "clusters": [{"name": "gone", "cluster": {"server": address}}],
            "users": [{"name": "gone", "user": {"token": "x"}}],
            "contexts": [context],
            "current-context": "gone",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))
        environment = {name: value for name, value in os.environ.items() if name != "KUBERNETES_SERVICE_HOST"}
        command = [sys.executable, "-m", "megatron_operator.cli", "run"]
        with subprocess.Popen(
            command, env={**environment, "KUBECONFIG": str(tmp_path / "kubeconfig")}, stderr=subprocess.PIPE, text=True
        ) as operator:
            assert operator.stderr is not None
            lines = [operator.stderr.readline() for _ in range(2)]
            operator.terminate()
            rest = operator.stderr.read()
    assert all("the API server cannot be reached" in line and "the next attempt is in" in line for line in lines)
    assert "Traceback" not in rest
    assert operator.returncode == 0


def test_make_help_lists_every_target() -> None:
    root = Path(__file__).parents[2]
    phony = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.M)
    assert phony is not None
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert sorted(line.split()[1] for line in done.stdout.splitlines()) == sorted(phony[1].split())
