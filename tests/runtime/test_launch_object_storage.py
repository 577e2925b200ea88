"""``megatron-serve model fetch s3://... --into``, with a server of S3's API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from suite_support.object_server import ObjectServer, object_server

from megatron_runtime.launch.model_cache import RECORD

WEIGHTS = bytes(range(256)) * 65536
OBJECTS = {
    "chat/v1/config.json": b"{}",
    "chat/v1/model.safetensors": WEIGHTS,
    "chat/v10/other.bin": b"no",
    "gguf/a-00001-of-00002.gguf": b"GGUF a",
    "gguf/a-00002-of-00002.gguf": b"GGUF b",
    "gguf/other.gguf": b"GGUF c",
    "bad/config.txt": b"",
}
FETCH = [sys.executable, "-m", "megatron_runtime.cli", "model", "fetch"]
Fetch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    """A server with a bucket of models."""
    with object_server("models") as server:
        server.put("models", OBJECTS)
        yield server


@pytest.fixture
def fetch(server: ObjectServer, tmp_path: Path) -> Fetch:
    """Runs the command for a URI, into the folder ``model``."""

    def fetch(uri: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [*FETCH, uri, "--into", str(tmp_path / "model"), *flags]
        variables = os.environ | server.environment | environment
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    return fetch


def test_a_folder_is_downloaded_once_with_all_of_its_objects(fetch: Fetch, tmp_path: Path) -> None:
    for environment in ({}, {"AWS_SECRET_ACCESS_KEY": "", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}):
        done = fetch("s3://models/chat/v1", **environment)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'model'}\n"), done.stderr
    folder = tmp_path / "model"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", RECORD}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert json.loads((folder / RECORD).read_text())["source"] == {"uri": "s3://models/chat/v1"}


def test_a_gguf_file_is_downloaded_with_its_other_parts(fetch: Fetch, tmp_path: Path) -> None:
    done = fetch("s3://models/gguf/a-00001-of-00002.gguf")
    assert done.returncode == 0, done.stderr
    assert "no checksum is stated of 2 files" in done.stderr
    assert len(list((tmp_path / "model").glob("*.gguf"))) == 2


def test_an_interrupted_download_repeats_only_objects_that_have_changed(
    fetch: Fetch, server: ObjectServer, tmp_path: Path
) -> None:
    server.put("models", {"again/config.json": b"{}", "again/model.safetensors": b"old!"})
    assert fetch("s3://models/again").returncode == 0
    # The state before the folder got its name, with one file of an older version.
    partial = (tmp_path / "model").rename(tmp_path / "model.partial")
    notes = partial / ".cache"
    notes.mkdir()
    (notes / "model.safetensors.etag").write_text('"of another version"')
    server.put("models", {"again/model.safetensors": b"new!"})
    assert fetch("s3://models/again").returncode == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"new!"


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://models/nothing", "has no files of a checkpoint"),
        ("s3://models/bad", "neither config.json nor a .gguf file found"),
        ("s3://missing/chat", "NoSuchBucket|Check the name, the credentials and the endpoint"),
        ("s3://models/gguf/none.gguf", "Check the name"),
    ],
)
def test_a_uri_without_a_model_is_named(fetch: Fetch, tmp_path: Path, uri: str, words: str) -> None:
    done = fetch(uri)
    assert done.returncode == 2
    assert f"megatron-serve model fetch: {uri}: " in done.stderr or uri == "s3://models/bad"
    assert any(each in done.stderr for each in words.split("|"))
    assert not (tmp_path / "model").exists()


def test_flags_of_the_hub_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    for flags, words in (
        ([], "requires --into"),
        (["--revision", "v1", "--into", str(tmp_path)], "is for repositories"),
    ):
        done = subprocess.run([*FETCH, "s3://models/chat", *flags], capture_output=True, text=True, check=False)
        assert (done.returncode, words in done.stderr) == (2, True)


def test_without_the_library_the_message_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*FETCH, "s3://models/chat", "--into", str(tmp_path / "model")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "s3://models/chat: the library obstore is not installed. Install it: pip install" in done.stderr
