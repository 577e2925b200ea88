"""The program for machines with a GPU: its dry run, and what it says of wrong results."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gpu_support.pretended import pretended_device

pytestmark = pytest.mark.usefixtures("device_guard")


def test_the_dry_run_goes_through_all_checks_and_finds_nothing_wrong(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Their dry runs are tests of their own, of processes instead of kernels.
    for name in ("server", "several_gpus"):
        monkeypatch.setattr(importlib.import_module(f"gpu_checks.{name}"), "checks", lambda _: ())
    with pretended_device():
        assert program.report(is_dry=True, without="fp8") == 0
    printed = capsys.readouterr().out
    names = (
        "attention: prompts",
        "attention to latents: prompts",
        "engine's tokens, latents, greedy, graphs",
        "latents of 16 heads: batch 2",
        "latents of 128 heads: prompt",
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
        "step, prompt of 16 tokens",
        "step, prompt of 8 tokens beside 2 requests of context 20",
        "batch-invariant: decode, batch 2",
        "capture of CUDA graphs for up to 2 requests",
        "time to first token",
        "engine step, batch 2 ",
        "engine step, batch 2, sampled",
        "suspension: memory given back",
        "suspension: addresses",
        "suspension: CUDA graphs",
        "suspension: tokens",
    )
    assert all(f"| {name}" in printed for name in (*names, "KV cache given", "ceiling: copy", "prefill of 20 tokens"))
    assert "WRONG" not in printed
    measured = r"\d ms a token, .* tokens/s; this engine: .* times as many"
    for kind in ("generate, batch 1", "generate, batch 2", "continuous batching, batch 2"):
        assert re.search(rf"\| transformers [\d.]+, {kind} +\| .*{measured}", printed)


@pytest.mark.usefixtures("program")
def test_the_sample_model_is_compared_where_it_is_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU in place of a GPU, where all runs are eager."""
    correctness, results = (importlib.import_module(f"gpu_checks.{name}") for name in ("correctness", "results"))
    monkeypatch.setattr(correctness, "on_device", lambda model: model)
    monkeypatch.setattr(correctness, "SAMPLE_RUNS", (("eager", 0, False), ("scored", 0, True)))
    found = [*correctness.check_sample_model(results.REAL)]
    assert [(each.name, each.value, each.is_wrong) for each in found] == [
        (f"engine's tokens, SmolLM2, {kind}", "equal", False) for kind in ("eager", "scored")
    ]
    monkeypatch.setattr(correctness, "models_folder", lambda: tmp_path)
    (missing,) = correctness.check_sample_model(results.REAL)
    assert (missing.value, missing.is_wrong) == (f"not run: {tmp_path / correctness.MODEL} is missing", False)
    (skipped,) = correctness.check_sample_model(results.TOY)
    assert skipped.value.startswith("not run: ")


@pytest.mark.usefixtures("program")
def test_a_peer_that_can_not_be_measured_is_no_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, peer = (importlib.import_module(f"gpu_checks.{name}") for name in ("results", "transformers_speed"))
    unfit = replace(sizes.TOY, model=sizes.TOY.model | {"num_kv_heads": 3})

    def found() -> list[str]:
        results = list(peer.measure(unfit, {}))
        assert not any(result.is_wrong for result in results)
        return [result.value for result in results]

    failed = found()
    assert len(failed) == 3
    assert all(re.match(r"not measured: \w+: .", value) for value in failed)
    monkeypatch.setattr(peer, "TIME_LIMIT", -1.0)
    assert found() == ["not measured: -1 s have passed"] * 3
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert found() == ["not measured: it is not installed; pip install transformers"]


def test_some_checks_can_be_run_alone(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pretended_device():
        assert program.report(is_dry=True, word="bits of products") == 0
    assert capsys.readouterr().out.count("| ok |") == 1


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
