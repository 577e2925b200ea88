"""Guards the rules of the tree that Python itself does not enforce."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_FILE = 350


def sources() -> list[Path]:
    """All Python files of the two packages."""
    return sorted([*(ROOT / "operator").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")])


@pytest.mark.parametrize("half", ["operator", "runtime"])
def test_no_loose_python_file_can_shadow_the_standard_library(half: str) -> None:
    assert sorted(path.name for path in (ROOT / half).glob("*.py")) == []


def test_the_tests_are_no_package() -> None:
    assert sorted(str(path) for path in (ROOT / "tests").rglob("__init__.py")) == []


def test_python_started_at_the_root_still_has_its_own_operator_module() -> None:
    script = "import operator, sys; print(operator.add(2, 3), operator.__file__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("5 ")
    assert str(ROOT) not in done.stdout


def test_no_source_file_outgrows_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
