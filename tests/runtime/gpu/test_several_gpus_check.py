"""The checks of several GPUs in the program for machines with GPUs, on ranks of a CPU."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest
import torch

SAID: dict[str, Any] = {"sums": {}, "tokens": {}, "seconds": {1: 0.5}}


def test_the_dry_run_compares_tokens_and_finds_the_killed_rank(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.report(is_dry=True, word="several GPUs") == 0
    printed = capsys.readouterr().out
    for kind in ("greedy", "all samplers"):
        assert f"| 2 ranks: engine's tokens, {kind} " in printed
    assert re.search(r"2 ranks: engine step, batch 2 +\| .* ms, .* tokens/s", printed)
    assert "the others name the ranks [[1]] after " in printed
    for kind in ("chosen", "by NCCL"):
        assert re.search(f"2 ranks: sum {kind}, bfloat16, 3 rows +[|] equal on all ranks, in the order of the", printed)
    assert printed.count("| ok |") == 3 + 2 * 4


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "equal on all ranks, in the order of the ranks; 2e+06 us"),
        ({"bits": "b"}, "other bits on other ranks; 2e+06 us"),
        ({"wrong": ["a row alone has other bits"]}, "a row alone has other bits; 2e+06 us"),
    ],
)
def test_other_bits_of_a_rank_are_wrong(changes: dict[str, Any], words: str) -> None:
    sums = importlib.import_module("gpu_checks.rank_sums")
    one = {"bits": "a", "wrong": [], "seconds": 1.0}
    found = [
        {"chosen": {"in order": True, "sums": {(torch.bfloat16, 8): each}}}
        for each in (one, one | {"seconds": 2.0} | changes)
    ]
    (result,) = sums.rows_of("2 GPUs", found)
    assert (result.name, result.value) == ("2 GPUs: sum chosen, bfloat16, 8 rows", words)
    assert result.is_wrong == bool(changes)


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
