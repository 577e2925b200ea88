"""The examples in the docs run as they are pasted, on one pod with SmolLM2, and print what the docs show."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_support import node
from suite_support.doc_blocks import DocBlock, doc_blocks, output_after
from suite_support.doc_shell import DocShell

pytestmark = pytest.mark.model

ADDRESS, MODEL = "http://127.0.0.1:8000", "smollm2"
"""Those of the server in the docs."""
OF_CLIENTS = "docs/http-api.md"
STAND_INS = {"make venv": "the environment of the tests", ". .venv/bin/activate": "PATH of the test"}
"""Commands of the quickstart that the test does not run, with what it has instead."""
START = 'megatron-serve --model "$MODEL"'
"""A script with it is the quickstart."""
WITHOUT_A_CLUSTER = "kind create cluster"
"""A block with it needs Docker and kind; tests/cluster/test_node_serving.py runs it with what the tests have."""


def for_the_pod(block: DocBlock, pod: Any) -> str:
    """The block with the pod's address and the name of its model."""
    text = block.text.replace(ADDRESS, str(pod.http.base_url).rstrip("/"))
    return re.sub(rf'"{MODEL}"', '"chat"', text)


def shown(block: DocBlock, printed: str) -> bool:
    """Whether the output is that of the docs, or any where they show none."""
    expected = output_after(block)
    return bool(printed.strip()) if expected is None else printed.strip() == expected.strip()


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("block", [each for each in doc_blocks("python") if each.page == OF_CLIENTS], ids=str)
def test_an_example_in_python_runs(block: DocBlock, shared_pod: Any) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(for_the_pod(block, shared_pod), str(block), "exec"), names)
    names["client"].close()
    assert shown(block, printed.getvalue()), printed.getvalue()


@pytest.mark.parametrize("block", doc_blocks("javascript"), ids=str)
def test_an_example_in_javascript_runs(block: DocBlock, shared_pod: Any, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(node.find(os.environ))
    script = tmp_path / "example.mjs"
    script.write_text(for_the_pod(block, shared_pod))
    env = {**os.environ, "NO_PROXY": "*"}
    done = subprocess.run([node.NODE, script], env=env, capture_output=True, text=True, timeout=node.LONGEST_RUN)
    assert done.returncode == 0, done.stderr
    assert shown(block, done.stdout), done.stdout


def scripts(*, quickstart: bool) -> list[DocBlock]:
    """The shell scripts for one machine: the quickstart, or those for its server."""
    blocks = [each for each in doc_blocks("bash") if WITHOUT_A_CLUSTER not in each.text]
    return [each for each in blocks if (START in each.text) is quickstart]


@pytest.mark.parametrize("block", scripts(quickstart=False), ids=str)
def test_a_script_runs(block: DocBlock, shared_pod: Any, tmp_path: Path) -> None:
    printed = DocShell(tmp_path).run(for_the_pod(block, shared_pod))
    assert ('"score"' if "/v1/score" in block.text else '"choices"') in printed


def test_the_quickstart_runs_as_pasted(new_host: Callable[[], str], smollm2_path: Path, tmp_path: Path) -> None:
    (quickstart,) = scripts(quickstart=True)
    lines = [line for line in quickstart.text.splitlines() if re.sub(r"\s+#.*", "", line) not in STAND_INS]
    host = new_host()
    reader = DocShell(tmp_path, MEGATRON_BIND_HOST=host, OMP_NUM_THREADS="1")
    reader.keep_models(smollm2_path.parent)
    end = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"
    printed = reader.run("\n".join([end, *lines]).replace(ADDRESS, f"http://{host}:8000"))
    assert '"content": "The capital of France is Paris."' in printed
    assert "Water boils at 100" in printed


def test_every_stand_in_is_a_command_of_the_quickstart() -> None:
    (quickstart,) = scripts(quickstart=True)
    lines = [re.sub(r"\s+#.*", "", line) for line in quickstart.text.splitlines()]
    assert STAND_INS.keys() <= set(lines)
    assert len(lines) <= 20
