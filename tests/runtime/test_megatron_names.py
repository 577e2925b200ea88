"""Every public name of Megatron Core 0.16 to 0.19 can be imported, or is left out with a reason."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "megatron-names.md").read_text()
RELEASED: dict[str, list[str]] = json.loads((Path(__file__).parent / "data" / "megatron_names.json").read_text())
"""The names that the modules of the released packages define, or export from a package."""


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading of the page."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


OFFERED = {module: quoted(names) for cell, names in rows("Names that can be imported") for module in quoted(cell)}
LEFT_OUT = [(quoted(modules), quoted(names), reason) for modules, names, reason in rows("Names that are left out")]


def is_left_out(module: str, name: str) -> bool:
    return any(
        any(fnmatchcase(module, each) for each in modules) and any(fnmatchcase(name, each) for each in names)
        for modules, names, _ in LEFT_OUT
    )


@pytest.mark.parametrize("module", OFFERED)
def test_every_listed_name_can_be_imported(module: str) -> None:
    found = importlib.import_module(f"megatron_runtime.{module}")
    assert [name for name in OFFERED[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", RELEASED)
def test_every_released_name_is_listed_or_left_out_and_not_both(module: str) -> None:
    listed = OFFERED.get(module, [])
    unclear = [name for name in RELEASED[module] if (name in listed) == is_left_out(module, name)]
    assert unclear == []


def test_only_released_names_are_listed() -> None:
    assert {module: sorted(set(names) - set(RELEASED.get(module, []))) for module, names in OFFERED.items()} == {
        module: [] for module in OFFERED
    }


def test_every_row_of_names_that_are_left_out_has_a_reason_and_is_needed() -> None:
    for modules, names, reason in LEFT_OUT:
        assert reason.endswith("."), names
        hits = [
            (module, name)
            for module, released in RELEASED.items()
            for name in released
            if any(fnmatchcase(module, each) for each in modules) and any(fnmatchcase(name, each) for each in names)
        ]
        for pattern in modules:
            assert any(fnmatchcase(module, pattern) for module, _ in hits), pattern
        for pattern in names:
            assert any(fnmatchcase(name, pattern) for _, name in hits), pattern


def test_a_name_is_the_class_of_this_package_under_both_paths() -> None:
    from megatron_runtime.engines import DynamicInferenceEngine as Exported
    from megatron_runtime.engines.dynamic_engine import DynamicInferenceEngine as Defined

    from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine

    assert Exported is Defined is DynamicInferenceEngine


def test_the_runtime_itself_imports_no_module_of_megatrons_paths() -> None:
    """They are for callers: an entry point that needs one would import all of the engine."""
    script = (
        "import sys; import megatron_runtime.rank, megatron_runtime.cli, megatron_runtime.apis;"
        "print([name for name in sys.modules if '/compat/' in (getattr(sys.modules[name], '__file__', '') or '')"
        " and name.startswith('megatron_runtime')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
