"""The program for machines with a GPU: its dry run, and what it says of wrong results."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gpu_support.pretended import pretended_device

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.usefixtures("device_guard")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def test_the_dry_run_goes_through_all_checks_and_finds_nothing_wrong(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pretended_device():
        assert program.report(is_dry=True) == 0
    printed = capsys.readouterr().out
    names = (
        "attention: prompts",
        "norm, float16",
        "bits of",
        "sampled tokens",
        "engine's tokens, all samplers, eager",
        "engine's tokens, all samplers, graphs",
        "engine's tokens, experts, greedy, graphs",
        "experts: clamped gates",
        "experts: decode, batch 2",
        "visits by expert",
        "decode, batch 2",
        "bits of products",
        "batch-invariant: decode, batch 2",
    )
    assert all(f"| {name}" in printed for name in (*names, "KV cache given", "ceiling: copy", "prefill of 20 tokens"))
    assert "WRONG" not in printed


@pytest.mark.usefixtures("program")
def test_a_wrong_result_and_an_error_are_both_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    correctness, results = (importlib.import_module(f"gpu_checks.{name}") for name in ("correctness", "results"))
    monkeypatch.setattr(correctness.rows, "gated", lambda given, _: given[:, ::2] * 0)

    def failing() -> Iterator[object]:
        raise RuntimeError("no kernel image is available\nfor this device")

    with pretended_device():
        found = list(results.run([("rows", lambda: correctness.check_rows(torch.float16)), ("failing", failing)]))
    assert [result.name for result in found if result.is_wrong] == ["gate of silu, float16", "failing"]
    results.print_results(found)
    printed = capsys.readouterr().out
    assert "| RuntimeError: no kernel image is available " in printed
    assert printed.count("WRONG") == 2
