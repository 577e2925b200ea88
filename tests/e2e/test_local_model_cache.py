"""`megatron-operator local` with a model cache: one folder of this machine, filled by the same download."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from suite_support.loopback_hub import LoopbackHub

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]


@pytest.fixture
def hub(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub with a tiny model, and an empty cache folder."""
    files = {path.name: path.read_bytes() for path in sorted(tiny_checkpoint.iterdir())}
    with LoopbackHub("owner/model", files).serving() as hub:
        monkeypatch.setenv("MEGATRON_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


def model(hub: LoopbackHub, **cache: Any) -> dict[str, Any]:
    return {"source": {"huggingFace": {"repo": hub.repo}}, "cache": cache}


def test_the_model_is_downloaded_once_for_all_sessions(start_local, hub: LoopbackHub, tmp_path: Path) -> None:
    for cache in ({"volumeClaim": {"size": "1Gi"}}, {"hostPath": {"path": "/var/models", "nodes": ["a", "b"]}}):
        command = start_local(models=None, replicas=1, frontend={"replicas": 1}, model=model(hub, **cache))
        command.wait_for("ready replicas: 1/1|Available: ")
        command.signal(signal.SIGTERM)
        assert command.exit_code() == 0
        assert hub.downloads == list(hub.files)
    (folder,) = (tmp_path / "cache" / "model-cache" / "default").glob("[!.]*")
    assert {path.name for path in folder.iterdir()} == {*hub.files, ".megatron-cache.json"}


def test_a_failed_download_ends_the_session_with_its_cause(start_local, hub: LoopbackHub) -> None:
    hub.stated = dict.fromkeys(hub.files, "0" * 64)
    command = start_local(models=None, replicas=1, model=model(hub, claimName="models"))
    assert command.exit_code() == 1
    assert f"the hub states {'0' * 64}" in command.text
