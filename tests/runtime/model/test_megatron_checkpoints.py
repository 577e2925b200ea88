"""Checkpoints that Megatron wrote have the logits that Megatron computed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.reference_models import CLOSE
from safetensors.torch import load_file

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.formats.checkpoint_path import checkpoint_path

WRITTEN = Path(__file__).parent.parent / "data" / "megatron"
ITERATION = "iter_0000010"


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """The folder of a training: a configuration, the number of the latest iteration, and its folder."""
    shutil.unpack_archive(WRITTEN / "training.zip", tmp_path)
    return tmp_path


def assert_megatron_s_logits(folder: Path, expected: Path, paged_requests: Any) -> None:
    stored = load_file(expected)
    with torch.inference_mode():
        ours = paged_requests(load_model(folder, dtype="float32")).forward({"it": stored["tokens"].tolist()})["it"]
    torch.testing.assert_close(ours, stored["logits"], **CLOSE)


@pytest.mark.parametrize("name", sorted(path.stem for path in WRITTEN.glob("*.zip")))
def test_what_megatron_wrote_has_the_logits_that_megatron_computed(
    name: str, tmp_path: Path, paged_requests: Any
) -> None:
    shutil.unpack_archive(WRITTEN / f"{name}.zip", tmp_path)
    assert_megatron_s_logits(tmp_path, tmp_path / "expected.safetensors", paged_requests)


def test_every_archive_is_there() -> None:
    assert {path.stem for path in WRITTEN.glob("*.zip")} == {
        *("training", "apart", "two_ranks", "experts", "experts_two_ranks", "experts_apart", "gpt2"),
        *("shared_experts", "sigmoid_routing", "sigmoid_routing_apart"),
        *("latents", "latents_two_ranks", "latents_of_queries"),
    }


def test_a_training_s_states_are_neither_missed_nor_counted(training: Path) -> None:
    layer = 16 * (32 + 16 + 48 + 24 + 2)
    assert inspect_checkpoint(training).num_parameters == 2 * layer + 16 * (29 + 29 + 1)


def test_an_iteration_with_a_configuration_is_found_by_its_folder_or_that_of_the_training(
    training: Path, paged_requests: Any
) -> None:
    shutil.move(training / "config.json", training / ITERATION)
    assert checkpoint_path(training) == training / ITERATION
    for folder in (training, training / ITERATION):
        assert_megatron_s_logits(folder, training / "expected.safetensors", paged_requests)


def test_a_released_model_is_found(training: Path, paged_requests: Any) -> None:
    (training / ITERATION).rename(training / "release")
    (training / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert_megatron_s_logits(training, training / "expected.safetensors", paged_requests)


def test_a_training_without_a_configuration_is_refused_with_the_remedy(training: Path) -> None:
    (training / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds a Megatron checkpoint, but no config.json. Put"):
        load_model(training, dtype="float32")


def test_a_training_without_its_latest_iteration_is_refused_with_a_message(training: Path) -> None:
    tracker = training / "latest_checkpointed_iteration.txt"
    tracker.write_text("20")
    with pytest.raises(CheckpointError, match=r"says 20, but there is no iter_0000020 beside it"):
        load_model(training, dtype="float32")
    for said in ("../..", "", "9" * 5000):
        tracker.write_text(said)
        with pytest.raises(CheckpointError, match=f"says '{re.escape(said[:40])}', expected the number of an"):
            load_model(training, dtype="float32")
    tracker.write_text("10")
    (training / ITERATION / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"iter_0000010: no .metadata found, so it isn't in the format"):
        load_model(training, dtype="float32")
