"""The installation takes PyTorch's build for CPUs, or none: never the build with CUDA without being asked."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tools/torch_for_cpu.py"
PLAIN, LOCAL = "9.9.0", "9.9.0+cpu"


@pytest.fixture(scope="module")
def torch_for_cpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_for_cpu", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look the module up
    spec.loader.exec_module(module)
    return module


class Pip:
    """Answers like pip: the sources in ``have`` have the wheel."""

    def __init__(self, module: ModuleType, *have: str) -> None:
        self.module = module
        self.have = have
        self.commands: list[list[str]] = []

    def __call__(self, words: Sequence[str]) -> object:
        self.commands.append(list(words))
        has_it = any(flag in words for flag in self.have) or ("configured" in self.have and "--index-url" not in words)
        return self.module.Outcome(None if has_it else "No matching distribution found")


def fetched(module: ModuleType, pip: Pip, chosen: str = "", system: str = "Linux") -> list[list[str]]:
    module.fetch(PLAIN, module.sources(chosen, system), ["install"], pip, print)
    return pip.commands


def test_a_configured_index_with_the_build_for_cpus_is_enough(torch_for_cpu: ModuleType) -> None:
    assert fetched(torch_for_cpu, Pip(torch_for_cpu, "configured")) == [["install", "--no-deps", f"torch=={LOCAL}"]]


def test_the_index_of_pytorch_is_asked_next(torch_for_cpu: ModuleType) -> None:
    first, second = fetched(torch_for_cpu, Pip(torch_for_cpu, torch_for_cpu.INDEX))
    assert "--index-url" not in first
    assert second[second.index("--index-url") + 1] == torch_for_cpu.INDEX
    assert second[-1] == f"torch=={LOCAL}"


def test_without_a_build_for_cpus_it_stops_and_names_the_remedies(torch_for_cpu: ModuleType) -> None:
    pip = Pip(torch_for_cpu)
    with pytest.raises(torch_for_cpu.NoTorchError) as stopped:
        fetched(torch_for_cpu, pip)
    words = str(stopped.value)
    assert "configured package index: No matching distribution found" in words
    assert f"{torch_for_cpu.INDEX}: No matching distribution found" in words
    assert "make demo TORCH_INDEX=FOLDER" in words
    assert f"pip download --no-deps --index-url {torch_for_cpu.INDEX} torch=={LOCAL}" in words
    assert all(command[-1] == f"torch=={LOCAL}" for command in pip.commands)


@pytest.mark.parametrize("chosen", ["https://mirror.example.com/torch-cpu", "."])
def test_a_chosen_source_is_the_only_one(torch_for_cpu: ModuleType, chosen: str) -> None:
    (command,) = fetched(torch_for_cpu, Pip(torch_for_cpu, chosen), chosen)
    assert chosen in command


@pytest.mark.parametrize(("chosen", "system"), [("default", "Linux"), ("", "Darwin")])
def test_pip_chooses_the_build_where_that_is_accepted_or_has_no_cuda(
    torch_for_cpu: ModuleType, chosen: str, system: str
) -> None:
    assert fetched(torch_for_cpu, Pip(torch_for_cpu), chosen, system) == []


def test_a_source_that_is_none_is_refused_by_name(torch_for_cpu: ModuleType) -> None:
    with pytest.raises(torch_for_cpu.NoTorchError, match=r"TORCH_INDEX=nowhere: is neither the URL"):
        torch_for_cpu.sources("nowhere", "Linux")


def test_the_version_is_the_pinned_one(torch_for_cpu: ModuleType) -> None:
    assert torch_for_cpu.pinned_version("numpy==1\ntorch==9.9.0\n") == PLAIN
    with pytest.raises(torch_for_cpu.NoTorchError, match="has no line torch==VERSION"):
        torch_for_cpu.pinned_version("torchvision==1\n")
    assert torch_for_cpu.pinned_version((ROOT / "constraints.txt").read_text())


def write_wheel(folder: Path, version: str) -> None:
    """A wheel of torch that contains only its metadata."""
    name = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(
            f"{name}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}/RECORD", "")


@pytest.mark.parametrize(("has_cpu_build", "expected"), [(True, [LOCAL]), (False, [])])
def test_pip_never_takes_another_build(
    torch_for_cpu: ModuleType,
    tmp_path: Path,
    has_cpu_build: bool,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With pip itself: a source that has a build with CUDA, and maybe one for CPUs."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for version in [PLAIN, LOCAL] if has_cpu_build else [PLAIN]:
        write_wheel(source, version)
    places = torch_for_cpu.sources(str(source), "Linux")
    action = ["download", "--quiet", "--isolated", "--dest", str(target)]
    if has_cpu_build:
        torch_for_cpu.fetch(PLAIN, places, action, torch_for_cpu.run_pip, print)
    else:
        with pytest.raises(torch_for_cpu.NoTorchError, match="No matching distribution found"):
            torch_for_cpu.fetch(PLAIN, places, action, torch_for_cpu.run_pip, print)
    assert [path.name.split("-")[1] for path in target.glob("*.whl")] == expected


def test_an_environment_that_has_the_version_is_left_alone() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
