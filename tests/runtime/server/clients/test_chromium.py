"""The selection of the browser for the tests of the page."""

from pathlib import Path

import pytest
from client_support import chromium
from cluster_support.errors import NoClientError


def make_program(folder: Path, code: int = 0) -> Path:
    folder.mkdir()
    program = folder / chromium.PROGRAM
    program.write_text(f"#!/bin/sh\nexit {code}\n")
    program.chmod(0o755)
    return program


def test_an_installed_browser_is_preferred(tmp_path: Path) -> None:
    make_program(tmp_path / "chromium")
    installed = make_program(tmp_path / "bin")
    assert chromium.find({"PATH": str(installed.parent), "MEGATRON_CACHE_DIR": str(tmp_path)}) == installed


def test_a_downloaded_browser_is_used_while_it_starts(tmp_path: Path) -> None:
    env = {"PATH": "/nowhere", "MEGATRON_CACHE_DIR": str(tmp_path)}
    fetched = make_program(tmp_path / "chromium")
    assert chromium.find(env) == fetched
    fetched.write_text("#!/bin/sh\nexit 127\n")
    with pytest.raises(NoClientError, match="make clients"):
        chromium.find(env)


def test_a_machine_without_apt_gets_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoClientError, match="no apt-get to download it: put chromium on PATH"):
        chromium.find_or_fetch({"PATH": "/nowhere", "MEGATRON_CACHE_DIR": str(tmp_path)}, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["chromium.lock"]
