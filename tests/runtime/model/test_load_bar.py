"""The progress bar shows progress, rate and result of loading."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.load_bar import LoadBar
from megatron_runtime.model.weights import LoadProgress


def test_the_bar_ends_with_all_bytes_and_their_rate(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "Llama")
    written = io.StringIO()
    seen: list[LoadProgress] = []
    with LoadBar(Console(file=written, width=100)) as bar:
        load_model(tmp_path, on_progress=lambda progress: (bar(progress), seen.append(progress)))
    kilobytes = inspect_checkpoint(tmp_path).weight_bytes / 1000
    assert f"{kilobytes:.1f}/{kilobytes:.1f} kB" in written.getvalue()
    assert "B/s" in written.getvalue()
    times = [progress.seconds for progress in seen]
    assert times == sorted(times)


def test_the_rate_is_that_of_all_bytes_so_far() -> None:
    written = io.StringIO()
    with LoadBar(Console(file=written, width=100, force_terminal=True)) as bar:
        bar(LoadProgress(30_000_000, 90_000_000, 2.0))
    assert "30.0/90.0 MB" in written.getvalue()
    assert "15.0 MB/s" in written.getvalue()
    assert LoadProgress(30, 90, 0.0).bytes_per_second > 0


def test_a_failed_load_restores_the_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(RuntimeError, match="broken off"), LoadBar(console):
        raise RuntimeError("broken off")
    assert "\x1b[?25h" in console.file.getvalue()  # type: ignore[attr-defined]
