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

pytestmark = [pytest.mark.usefixtures("device_guard"), pytest.mark.timeout(900)]


CHECKED = ("correctness", "features", "memory", "mixtures")
MEASURED = ("speed", "flashinfer", "prompt_steps", "engine_speed", "transformers_speed")
PROCESSES = ("server", "several_gpus")
"""Modules of checks. The dry runs of the last ones, of processes instead of kernels, are tests of their own, and so are
those of fp8."""


def dry_run(
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    without: tuple[str, ...],
) -> str:
    """What the program prints without these modules; nothing is wrong."""
    for name in without:
        module = importlib.import_module(f"gpu_checks.{name}")
        for kind in ("checks", "measurements"):
            monkeypatch.setattr(module, kind, lambda *_: (), raising=False)
    with pretended_device():
        assert program.report(is_dry=True, without="fp8") == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert re.search(r"\ntime in all: \d+ min \d+ s\n$", printed)
    return printed


def test_the_dry_run_goes_through_all_checks_and_finds_nothing_wrong(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = dry_run(program, monkeypatch, capsys, without=(*MEASURED, *PROCESSES))
    names = (
        "attention: prompts",
        "attention: several splits, soft cap, window and sinks",
        "attention to latents: prompts",
        "engine's tokens, latents, greedy, graphs",
        "norm, float16",
        "bits of",
        "bits of products",
        "sampled tokens",
        "sampled tokens, some logits not finite, truncated",
        "edited logits",
        "counted penalties",
        "log probabilities of the sampled",
        "engine's tokens, greedy, graphs one after the other",
        "engine's log probabilities, all samplers, graphs one",
        "engine's tokens, all samplers, eager",
        "engine's tokens, all samplers, graphs ",
        "engine's tokens, penalties, graphs",
        "engine's tokens, greedy, eager",
        "engine's tokens, adapters, eager",
        "engine's tokens, drafts of prompt lookup, eager",
        "engine's tokens, experts, greedy, graphs",
        "experts: clamped gates",
        "experts: decode, batch 2",
        "visits by expert",
        "suspension: memory given back",
        "suspension: addresses",
        "suspension: CUDA graphs",
        "suspension: tokens",
        "largest pass: KV cache",
    )
    assert all(f"| {name}" in printed for name in names)


def test_the_dry_run_goes_through_all_measurements(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = dry_run(program, monkeypatch, capsys, without=(*CHECKED, *PROCESSES))
    names = (
        "latents of 16 heads: batch 2",
        "latents of 128 heads: prompt",
        "decode, batch 2",
        "step, prompt of 16 tokens",
        "step, prompt of 8 tokens beside 2 requests of context 20",
        "batch-invariant: decode, batch 2",
        "capture of CUDA graphs for up to 2 requests",
        "time to first token",
        "engine step, batch 2 ",
        "engine step, batch 2, sampled",
        "KV cache given",
        "ceiling: copy",
        "prefill of 20 tokens",
    )
    assert all(f"| {name}" in printed for name in names)
    measured = r"\d ms a token, .* tokens/s; this engine: .* times as many"
    for kind in ("generate, batch 1", "generate, batch 2", "continuous batching, batch 2"):
        assert re.search(rf"\| transformers [\d.]+, {kind} +\| .*{measured}", printed)


def test_a_program_that_takes_too_long_says_so(program: ModuleType) -> None:
    assert program.duration(480, is_dry=False) == "time in all: 8 min 0 s"
    late = "time in all: 8 min 2 s, more than the 8 minutes that all of it should take"
    assert program.duration(481.6, is_dry=False) == late
    assert program.duration(481.6, is_dry=True) == "time in all: 8 min 2 s"


@pytest.mark.usefixtures("program")
def test_a_largest_pass_that_does_not_fit_or_is_smaller_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, results = (importlib.import_module(f"gpu_checks.{name}") for name in ("memory", "results"))
    monkeypatch.setattr(memory, "measure_kv_cache_memory", lambda *_: 1 << 20)

    def without_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    with pretended_device():
        with monkeypatch.context() as patching:
            patching.setattr(memory.TextGenerationController, "run", without_room)
            (full,) = memory.check_largest_pass(results.TOY)
        monkeypatch.setattr(memory, "fill_pass", lambda *_: 0)
        (small,) = memory.check_largest_pass(results.TOY)
    assert (full.is_wrong, "3 of 3 requests failed" in full.value) == (True, True)
    assert (small.is_wrong, "0 of 3 requests failed, a pass of 0 tokens" in small.value) == (True, True)


@pytest.mark.usefixtures("program")
def test_wrong_edits_and_log_probabilities_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = importlib.import_module("gpu_checks.sampling")
    with pretended_device(), monkeypatch.context() as patching:
        patching.setattr("megatron_runtime.engine.sampling.gpu_edits.GpuEdits.apply_", lambda *_: None)
        edited, _ = sampling.check_edits(257)
    assert edited.is_wrong
    expected = torch.tensor([-1.0, -torch.inf])
    for first, second, is_wrong in (
        (-1.00005, -torch.inf, False),
        (-1.0002, -torch.inf, True),
        (-1.0, -20.0, True),
        (torch.nan, -torch.inf, True),
    ):
        assert sampling.near_log_probs("", torch.tensor([first, second]), expected).is_wrong == is_wrong


@pytest.mark.usefixtures("program")
def test_the_sample_model_is_compared_where_it_is_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the CPU in place of a GPU, where all runs are eager."""
    correctness, results = (importlib.import_module(f"gpu_checks.{name}") for name in ("correctness", "results"))
    monkeypatch.setattr(correctness, "on_device", lambda model: model)
    monkeypatch.setattr(correctness, "RUNS", (("eager", 0, False), ("scored", 0, True)))
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
    monkeypatch.setattr(correctness.rows, "gated", lambda given, *_: given[:, ::2] * 0)

    def failing() -> Iterator[object]:
        raise RuntimeError("no kernel image is available\nfor this device")

    with pretended_device():
        found = list(results.run([("rows", lambda: correctness.check_rows(torch.float16)), ("failing", failing)]))
    wrong = [result.name for result in found if result.is_wrong]
    assert wrong == ["gate of silu, float16", "clamped gate, float16", "failing"]
    results.print_results(found)
    printed = capsys.readouterr().out
    assert "| RuntimeError: no kernel image is available " in printed
    assert printed.count("WRONG") == 3
