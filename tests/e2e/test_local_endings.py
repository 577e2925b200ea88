"""The end of `megatron-operator local`, and invalid resources: messages, exit codes, and no remaining processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "phase: Pending"), (signal.SIGTERM, "phase: Starting"), (signal.SIGINT, "Loading at")],
)
def test_a_start_can_be_ended_at_any_moment(start_local, number: signal.Signals, moment: str) -> None:
    command = start_local(replicas=1)
    command.wait_for(moment)
    command.signal(number)
    assert command.exit_code() == 0
    assert command.left_over() == set()


def test_a_second_interrupt_kills_at_once(start_local) -> None:
    command = start_local(replicas=1)
    command.wait_for("Loading at")
    command.signal(signal.SIGINT)
    command.signal(signal.SIGINT)
    assert command.exit_code() == 0
    assert command.left_over() == set()


def test_no_process_survives_a_killed_command(start_local, wait_until) -> None:
    command = start_local(replicas=1)
    command.wait_for("Loading at")
    command.signal(signal.SIGKILL)
    assert command.exit_code() == -signal.SIGKILL
    wait_until(lambda: command.left_over() == set(), "the end of every process")
    assert command.left_over() == set()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replcias": 2}, "spec.replcias: 2: unknown field; did you mean replicas?"),
        ({"replicas": 0}, "spec.replicas: 0: must be at least 1"),
        (
            {"model": {"source": {"path": "/models/nowhere.gguf"}}},
            "spec.model.source.path: /models/nowhere.gguf: no such",
        ),
        (
            {"model": {"source": {"path": "/models/a.gguf", "huggingFace": {"repo": "a/b"}}}},
            "remove all but one",
        ),
        ({"parallelism": {"tensor": 2, "expert": 3}}, "spec.parallelism.expert: 3: does not divide the 2 tensor"),
    ],
)
def test_an_invalid_resource_is_refused_before_anything_starts(
    start_local, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    command = start_local(models=tmp_path, **changes)
    assert command.exit_code() == 2
    assert words in command.text
    assert "AttemptStarted" not in command.text


@pytest.mark.parametrize(
    "source",
    [{"persistentVolumeClaim": {"claimName": "m", "path": "/a"}}, {"image": {"reference": "registry/m:1"}}],
    ids=["claim", "image"],
)
def test_a_volume_that_only_a_cluster_has_must_be_mapped_to_a_folder(start_local, source: dict[str, Any]) -> None:
    command = start_local(models=None, model={"source": source})
    assert command.exit_code() == 2
    assert "map it with --map-path /models=FOLDER" in command.text


def truncated(good: Path, folder: Path) -> None:
    with good.open("rb") as source:
        (folder / "model.gguf").write_bytes(source.read(20_000_000))


def not_a_model(_good: Path, folder: Path) -> None:
    (folder / "model.gguf").write_text("<html>404</html>" * 100)


def another_architecture(_good: Path, folder: Path) -> None:
    writer = GGUFWriter(folder / "model.gguf", "whisper")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("make", [truncated, not_a_model, another_architecture])
def test_a_broken_checkpoint_is_refused_with_its_field_and_its_file(
    start_local, smollm2_path: Path, tmp_path: Path, make: Any
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    make(smollm2_path, models)
    command = start_local(models=models, replicas=1, model={"source": {"path": "/models/model.gguf"}})
    assert command.exit_code() == 2
    assert "spec.model.source" in command.text
    assert "model.gguf" in command.text
    assert "Traceback" not in command.text
    assert command.left_over() == set()


def test_too_little_memory_is_refused_with_field_value_and_remedy(start_local) -> None:
    command = start_local(replicas=1, engine={"kvCacheMemory": "900Ti"})
    assert command.exit_code() == 2
    assert "spec.engine.kvCacheMemory 900Ti" in command.text
    assert "use a smaller cache" in command.text
    assert command.left_over() == set()
