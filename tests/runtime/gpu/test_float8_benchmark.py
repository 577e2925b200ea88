"""The checks and measurements of fp8 in the program for machines with a GPU: their dry run."""

from __future__ import annotations

from types import ModuleType

import pytest
from gpu_support.pretended import pretended_device


@pytest.mark.usefixtures("device_guard")
def test_the_dry_run_of_fp8_finds_nothing_wrong(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pretended_device():
        assert program.report(is_dry=True, word="fp8") == 0
    printed = capsys.readouterr().out
    names = (
        "fp8: scales of rows, a bias, 60 rows",
        "bits of products with fp8, fixed tiles",
        "engine's tokens, fp8 weights, graphs",
        "fp8: products of a layer, 20 rows, scales of blocks",
        "fp8, scales of rows: weights",
        "fp8, scales of blocks: decode, batch 1",
        "attention, fp8 cache: prompts and single tokens",
        "bits of a request in other batches, fp8 cache",
        "engine's tokens, fp8 cache, graphs",
        "fp8 cache: prefill",
        "fp8: experts, scales of groups",
        "fp8 experts: decode, batch 1",
        "fp8 cache: decode, batch 1",
    )
    assert all(f"| {name}" in printed for name in names)
    assert "WRONG" not in printed
