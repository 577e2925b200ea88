"""The checks of several GPUs in the program for machines with GPUs, on ranks of a CPU."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest
import torch

SAID = {"tokens": {}, "seconds": {1: 0.5}}


def test_the_dry_run_compares_tokens_and_finds_the_killed_rank(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.report(is_dry=True, word="several GPUs") == 0
    printed = capsys.readouterr().out
    for kind in ("greedy", "all samplers"):
        assert f"| 2 ranks: engine's tokens, {kind} " in printed
    assert re.search(r"2 ranks: engine step, batch 2 +\| .* ms, .* tokens/s", printed)
    assert "the others name the ranks [[1]] after " in printed
    assert printed.count("| ok |") == 3


@pytest.mark.usefixtures("program")
def test_a_single_gpu_is_named_and_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    several, sizes = (importlib.import_module(f"gpu_checks.{name}") for name in ("several_gpus", "results"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(several, "free_memory", lambda **_: None)
    (result,) = several.check(sizes.REAL)
    assert (result.value, result.is_wrong) == ("not run: this machine has 1 GPU", False)


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("lost", "wrong"),
    [
        ({"missing": [1], "time": 103.0}, False),
        ({"missing": [0], "time": 103.0}, True),
        ({"missing": [], "time": 103.0}, True),
        ({"missing": [1], "time": 160.0}, True),
    ],
)
def test_a_wrong_name_or_a_late_error_is_wrong(
    monkeypatch: pytest.MonkeyPatch, lost: dict[str, Any], wrong: bool
) -> None:
    several, sizes = (importlib.import_module(f"gpu_checks.{name}") for name in ("several_gpus", "results"))
    monkeypatch.setattr(several, "_SAMPLERS", {})
    monkeypatch.setattr(several, "_run", lambda *_: ([SAID | {"lost": lost}, SAID], 100.0))
    assert [result.is_wrong for result in several.check(sizes.TOY)] == [False, wrong]
