"""The rules of the source tree, and its descriptions in the README and the design document."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 350
MAX_FUNCTION_LINES = 50
FOLDERS = ("operator", "runtime", "tests", "benchmarks", "examples", "tools")
BOTH_SIDES = {"EngineState", "Lifecycle"}
"""Values in the interface between operator and runtime, which do not import each other."""


def sources() -> list[Path]:
    """All Python files of the two packages."""
    return sorted([*(ROOT / "operator").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")])


@pytest.mark.parametrize("half", ["operator", "runtime"])
def test_no_loose_python_file_can_shadow_the_standard_library(half: str) -> None:
    assert sorted(path.name for path in (ROOT / half).glob("*.py")) == []


def test_the_tests_are_not_a_package() -> None:
    assert sorted(str(path) for path in (ROOT / "tests").rglob("__init__.py")) == []


def test_python_started_at_the_root_still_has_its_own_operator_module() -> None:
    script = "import operator, sys; print(operator.add(2, 3), operator.__file__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("5 ")
    assert str(ROOT) not in done.stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_and_no_function_is_too_long(folder: str) -> None:
    too_long = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if len(text.splitlines()) > MAX_LINES:
            too_long.append(name)
        functions = (
            each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        too_long += [f"{name}: {each.name}" for each in functions if lines_of(each) > MAX_FUNCTION_LINES]
    assert too_long == []


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_no_two_classes_have_the_same_name() -> None:
    names = [
        each.name
        for path in sources()
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} == BOTH_SIDES


def test_every_module_has_a_docstring() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def layers_in_pyproject(package: str) -> list[set[str]]:
    """The layers of a package in import-linter's contract, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == [package])
    return [set(layer.split(" | ")) for layer in layers]


@pytest.mark.parametrize(("package", "place"), [("megatron_runtime", 0), ("megatron_operator", 1)])
def test_the_design_document_lists_the_layers_of_import_linter(package: str, place: int) -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    table = re.split(r"\| layer \| content \|\n\|---\|---\|\n", text)[1 + place].split("\n\n")[0]
    listed = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in table.splitlines()]
    assert listed == layers_in_pyproject(package)


def map_in_readme() -> str:
    """The map of the source tree in the README."""
    return (ROOT / "README.md").read_text().split("## Source tree")[1].split("```")[1]


def test_the_map_in_the_readme_has_every_module_of_the_top_level() -> None:
    listed = {name.rstrip("/") for name in re.findall(r"[\w.]+/|\w+\.py", map_in_readme())}
    for package in ("operator/megatron_operator", "runtime/megatron_runtime"):
        paths = [path for path in (ROOT / package).iterdir() if path.is_dir() or path.suffix == ".py"]
        folders = {path.name for path in paths if path.is_dir() and path.name != "__pycache__"}
        assert sorted(folders - listed) == []
    runtime = {path.name for path in (ROOT / "runtime/megatron_runtime").glob("*.py")} - {"__init__.py"}
    assert sorted(runtime - listed) == []


def test_the_map_in_the_readme_names_existing_files() -> None:
    names = {name.rstrip("/") for name in re.findall(r"(?<![\w/])[\w.]+/|\w+\.py", map_in_readme())}
    existing = {path.name for path in ROOT.glob("*")}
    for folder in ("operator", "runtime", "tests", "examples"):
        existing |= {path.name for path in (ROOT / folder).rglob("*")}
    assert sorted(names - existing) == []
