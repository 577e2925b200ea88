"""Log lines of the launcher and its children."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.check import check_device
from megatron_runtime.launch.options import EngineOptions
from megatron_runtime.processes.child import Child, ChildTask
from megatron_runtime.processes.log_format import FORMAT_VARIABLE

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
MODULE = """
import json, logging, sys
from megatron_runtime.processes.parent_link import ParentLink
link = ParentLink.from_arguments()
log = logging.getLogger("engine")
log.debug("hidden")
log.warning("two\\nlines")
print("from a library")
print(json.dumps({"log": "access"}))
try:
    raise ValueError("bad")
except ValueError:
    log.exception("failed")
"""


def lines_of_a_child(folder: Path, monkeypatch: pytest.MonkeyPatch, log_format: str) -> list[str]:
    (folder / "logging_child.py").write_text(MODULE)
    monkeypatch.setenv(FORMAT_VARIABLE, log_format)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    log = io.StringIO()

    async def run() -> int:
        child = Child(ChildTask("rank 0", "logging_child", environment={"PYTHONPATH": path}), log=log)
        await child.start()
        return await child.wait()

    assert asyncio.run(run()) == 0
    return log.getvalue().splitlines()


def test_text_lines_have_role_time_and_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of_a_child(tmp_path, monkeypatch, "text")
    assert re.fullmatch(rf"\[rank 0\] {TIME} WARNING engine: two", lines[0])
    assert lines[1:4] == ["[rank 0] lines", "[rank 0] from a library", '{"log": "access"}']
    assert re.fullmatch(rf"\[rank 0\] {TIME} ERROR engine: failed", lines[4])
    assert lines[-1] == "[rank 0] ValueError: bad"


def test_json_lines_are_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, library, access, last = map(json.loads, lines_of_a_child(tmp_path, monkeypatch, "json"))
    assert access == {"log": "access"}
    assert (first["level"], first["logger"], first["message"]) == ("WARNING", "engine", "two\nlines")
    assert (library["level"], library["message"]) == ("INFO", "from a library")
    assert last["exception"].endswith("ValueError: bad")
    for entry in (first, library, last):
        assert re.fullmatch(TIME, entry["time"])
        assert entry["process"] == "rank 0"


def serve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_runtime.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_line_prints_its_version_and_rejects_an_unknown_format() -> None:
    assert serve("--version").stdout == f"megatron-serve {version('megatron-inference')}\n"
    rejected = serve("--log-format", "xml", "--model", "x")
    assert (rejected.returncode, rejected.stderr) == (
        2,
        "megatron-serve: --log-format xml: must be one of text, json\n",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_of_a_gpu_fails_without_one(tiny_checkpoint: Path) -> None:
    rejected = serve("--check", "--device", "cuda", "--model", str(tiny_checkpoint))
    assert rejected.returncode == 2
    (line,) = rejected.stderr.splitlines()
    assert line.startswith("megatron-serve: --device cuda: PyTorch ")


def test_the_check_requires_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device(EngineOptions(device="cpu"), 8)
    engine = EngineOptions(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigurationError, match=r"--device cuda: PyTorch .* is a build without CUDA"):
        check_device(engine, 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigurationError, match="--device cuda: PyTorch finds no GPU; check nvidia-smi"):
        check_device(engine, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device(engine, 2)
    with pytest.raises(ConfigurationError, match="3 ranks need a GPU each, and this machine has 2"):
        check_device(engine, 3)
