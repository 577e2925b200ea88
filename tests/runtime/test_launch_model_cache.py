"""``megatron-serve model fetch --into``: verified downloads into the folder of a model cache, with a small hub."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from suite_support.loopback_hub import COMMIT, LoopbackHub

from megatron_runtime.launch.model_cache import PARTIAL, RECORD

WEIGHTS = bytes(range(256)) * 4096
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "README.md": b"words"}
FETCH = [sys.executable, "-m", "megatron_runtime.cli", "model", "fetch"]
WANTED = ["config.json", "model.safetensors"]


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    """A hub with a checkpoint in the format of transformers."""
    with LoopbackHub("owner/model", FILES).serving() as hub:
        yield hub


Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the source in the cache; it does not exist yet."""
    return tmp_path / "models" / "source"


@pytest.fixture
def begin(hub: LoopbackHub, tmp_path: Path, folder: Path) -> Begin:
    """Starts the command."""

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        ours["MEGATRON_TERMINATION_LOG"] = str(tmp_path / "log")
        return subprocess.Popen(
            [*FETCH, "owner/model", "--into", str(folder), *arguments],
            env=os.environ | ours | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error."""
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_a_source_is_downloaded_once_and_its_folder_appears_when_it_is_complete(
    begin: Begin, hub: LoopbackHub, folder: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert end(begin("--revision", "main"))[0] == 0
        assert sorted(path.name for path in folder.iterdir()) == [RECORD, *WANTED]
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS
        assert hub.downloads == WANTED
        told = json.loads((tmp_path / "log").read_text())
        assert told == {"bytes": len(WEIGHTS) + 2, "commit": COMMIT}
    assert json.loads((folder / RECORD).read_text())["source"]["revision"] == "main"


def test_of_concurrent_runs_one_downloads(begin: Begin, hub: LoopbackHub, folder: Path) -> None:
    assert [end(each)[0] for each in [begin(), begin()]] == [0, 0]
    assert hub.downloads == WANTED
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_the_progress_is_served_until_the_end(begin: Begin, hub: LoopbackHub, folder: Path) -> None:
    token, address = secrets.token_urlsafe(32), "127.0.77.5"
    hub.may_finish.clear()
    process = begin(MEGATRON_BIND_HOST=address, MEGATRON_CONTROL_TOKEN=token)
    url, headers = f"http://{address}:9000/v1/state", {"Authorization": f"Bearer {token}"}
    rank: dict[str, int] = {}
    with httpx.Client(trust_env=False) as client:
        while not 0 < rank.get("loadedBytes", 0) < rank["totalBytes"]:
            assert process.poll() is None
            time.sleep(0.1)
            try:
                rank = client.get(url, headers=headers).json()["ranks"][0]
            except httpx.TransportError:
                rank = {"totalBytes": 0}
        assert client.get(url).status_code == 401
    assert rank["totalBytes"] == len(WEIGHTS) + 2
    assert not folder.exists()
    hub.may_finish.set()
    assert end(process)[0] == 0
    assert folder.exists()


def test_a_wrong_checksum_is_an_error_and_the_next_run_repeats_only_that_file(
    begin: Begin, hub: LoopbackHub, folder: Path, tmp_path: Path
) -> None:
    hub.stated["model.safetensors"] = "0" * 64
    code, errors = end(begin())
    assert code == 2
    found = hashlib.sha256(WEIGHTS).hexdigest()
    assert f"model.safetensors: sha256 is {found}, but the hub states {'0' * 64}" in errors
    assert found in json.loads((tmp_path / "log").read_text())["message"]
    assert not folder.exists()
    hub.stated.clear()
    hub.asked.clear()
    assert end(begin())[0] == 0
    assert hub.downloads == ["model.safetensors"]


def test_small_files_have_checksums_of_git_and_other_checksums_are_reported(begin: Begin, hub: LoopbackHub) -> None:
    hub.stated["config.json"] = hashlib.sha1(b"blob 2\0{}").hexdigest()
    hub.stated["model.safetensors"] = "unknown"
    code, errors = end(begin())
    assert code == 0
    assert "no checksum is stated of model.safetensors; only the size was compared" in errors


def test_a_wrong_checksum_of_git_is_an_error(begin: Begin, hub: LoopbackHub) -> None:
    hub.stated["config.json"] = "0" * 40
    assert "config.json: git's sha1 is" in end(begin())[1]


def test_a_damaged_folder_is_filled_again(begin: Begin, hub: LoopbackHub, folder: Path) -> None:
    assert end(begin())[0] == 0
    (folder / "model.safetensors").unlink()
    assert end(begin())[0] == 0
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads == sorted(2 * WANTED)


def evict(folder: Path, unused_for: float = 0) -> tuple[int, str]:
    """Exit code and standard error of the command."""
    command = [*FETCH[:-1], "evict", str(folder), f"--unused-for={unused_for}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_an_evicted_folder_is_removed_and_filled_again_by_the_next_download(
    begin: Begin, hub: LoopbackHub, folder: Path
) -> None:
    other = folder.with_name("other")
    other.mkdir(parents=True)
    assert end(begin())[0] == 0
    code, errors = evict(folder)
    assert (code, f"{folder} is removed" in errors) == (0, True)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [other.name]
    assert evict(folder)[0] == 0  # a Job that is repeated
    assert end(begin())[0] == 0
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads == sorted(2 * WANTED)


def test_a_folder_that_a_download_has_found_again_stays(begin: Begin, hub: LoopbackHub, folder: Path) -> None:
    assert end(begin())[0] == 0
    os.utime(folder, (0, 0))
    assert end(begin())[0] == 0
    assert "is in use and stays" in evict(folder, 60)[1]
    assert (folder / RECORD).exists()
    assert hub.downloads == WANTED
    os.utime(folder, (0, 0))
    assert "is removed" in evict(folder, 60)[1]


def test_a_folder_stays_while_a_download_fills_it(begin: Begin, hub: LoopbackHub, folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}{PARTIAL}")
    hub.may_finish.clear()
    process = begin()
    while not partial.exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert "is in use and stays" in evict(folder)[1]
    assert partial.exists()
    process.kill()
    process.communicate()
    hub.may_finish.set()
    assert "is removed" in evict(folder)[1]
    assert not partial.exists()


def test_other_folders_are_not_evicted(folder: Path) -> None:
    folder.mkdir(parents=True)
    code, errors = evict(folder)
    assert (code, f"{folder}: is no folder of a model cache" in errors) == (2, True)
    assert folder.exists()
    assert evict(folder / "missing" / "folder") == (0, f"model: {folder / 'missing' / 'folder'} is removed\n")


def test_folders_need_a_source(tmp_path: Path) -> None:
    for flags in (["--into", str(tmp_path)], ["--revision", "main"]):
        done = subprocess.run([*FETCH, *flags], capture_output=True, text=True, check=False)
        assert (done.returncode, "requires" in done.stderr) == (2, True)
