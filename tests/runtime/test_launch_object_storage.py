"""``megatron-serve model fetch s3://... --into`` and ``gs://...``, with servers of both APIs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from suite_support.gcs_server import GcsServer, gcs_server
from suite_support.object_server import ObjectServer, object_server

from megatron_runtime.errors import CheckpointError
from megatron_runtime.launch.model_cache import RECORD
from megatron_runtime.model.formats.object_storage import download_objects, object_files

WEIGHTS = bytes(range(256)) * 65536
OBJECTS = {
    "chat/v1/": b"",  # as a console creates folders
    "chat/v1/original/": b"",
    "chat/v1/original/params.json": b"{}",
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


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[ObjectServer | GcsServer]:
    """A server with a bucket of models."""
    with object_server("models") if request.param == "s3" else gcs_server("models") as server:
        server.put("models", OBJECTS)
        yield server


@pytest.fixture
def scheme(server: ObjectServer | GcsServer) -> str:
    """The scheme of its URIs."""
    return "gs" if isinstance(server, GcsServer) else "s3"


@pytest.fixture
def fetch(server: ObjectServer | GcsServer, scheme: str, tmp_path: Path) -> Fetch:
    """Runs the command for a bucket and path, into the folder ``model``."""

    def fetch(path: str, *flags: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        command = [*FETCH, f"{scheme}://{path}", "--into", str(tmp_path / "model"), *flags]
        variables = os.environ | server.environment | environment
        given = {name: value for name, value in variables.items() if value is not None}
        return subprocess.run(command, env=given, capture_output=True, text=True, check=False)

    return fetch


UNREACHABLE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(
        {"gcs_base_url": "http://127.0.0.1:1", "disable_oauth": True, "client_email": "", "private_key": ""}
    ),
}


def test_a_folder_is_downloaded_once_with_all_of_its_objects(fetch: Fetch, scheme: str, tmp_path: Path) -> None:
    for environment in ({}, UNREACHABLE):
        done = fetch("models/chat/v1", **environment)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'model'}\n"), done.stderr
    folder = tmp_path / "model"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "original", RECORD}
    assert [path.name for path in (folder / "original").iterdir()] == ["params.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert json.loads((folder / RECORD).read_text())["source"] == {"uri": f"{scheme}://models/chat/v1"}


@pytest.mark.parametrize(("name", "uri"), [("config.json", "models/sums"), ("a.gguf", "models/sums-of-a-file/a.gguf")])
def test_files_are_compared_with_the_checksums_beside_them(
    fetch: Fetch, server: ObjectServer | GcsServer, tmp_path: Path, name: str, uri: str
) -> None:
    folder = uri.removeprefix("models/").partition("/")[0]
    right, wrong = (hashlib.sha256(each).hexdigest() for each in (b"{}", b"other"))
    server.put("models", {f"{folder}/{name}": b"{}", f"{folder}/SHA256SUMS": f"{wrong}  {name}\n".encode()})
    done = fetch(uri)
    assert done.returncode == 2
    assert f"{name}: sha256 is {right}, but SHA256SUMS states {wrong}" in done.stderr
    assert not (tmp_path / "model").exists()
    server.put("models", {f"{folder}/SHA256SUMS": f"{right} *./{name}\n".encode()})
    done = fetch(uri)
    assert done.returncode == 0
    assert "no checksum" not in done.stderr
    assert {path.name for path in (tmp_path / "model").iterdir()} == {name, RECORD}


def test_a_file_with_checksums_that_does_not_fit_is_an_error(fetch: Fetch, server: ObjectServer | GcsServer) -> None:
    server.put("models", {"unfit/config.json": b"{}", "unfit/SHA256SUMS": f"{'0' * 64}  model.gguf\n".encode()})
    assert "SHA256SUMS lists model.gguf, which the bucket does not have" in fetch("models/unfit").stderr
    server.put("models", {"unfit/SHA256SUMS": b"<html>"})
    assert "SHA256SUMS: '<html>' is no line of it. Write it with sha256sum" in fetch("models/unfit").stderr


def test_a_gguf_file_is_downloaded_with_its_other_parts(fetch: Fetch, tmp_path: Path) -> None:
    done = fetch("models/gguf/a-00001-of-00002.gguf")
    assert done.returncode == 0, done.stderr
    assert "no checksum is stated of 2 files" in done.stderr
    assert len(list((tmp_path / "model").glob("*.gguf"))) == 2


def test_an_interrupted_download_repeats_only_objects_that_have_changed(
    fetch: Fetch, server: ObjectServer | GcsServer, tmp_path: Path
) -> None:
    server.put("models", {"again/config.json": b"{}", "again/model.safetensors": b"old!"})
    assert fetch("models/again").returncode == 0
    # The state before the folder got its name, with one file of an older version.
    partial = (tmp_path / "model").rename(tmp_path / "model.partial")
    notes = partial / ".cache"
    notes.mkdir()
    (notes / "model.safetensors.etag").write_text('"of another version"')
    server.put("models", {"again/model.safetensors": b"new!"})
    assert fetch("models/again").returncode == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"new!"


def test_an_object_that_changes_during_the_download_is_an_error(
    server: ObjectServer | GcsServer, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"{scheme}://models/changing"
    server.put("models", {"changing/config.json": b"{1}"})
    files = object_files(uri)
    server.put("models", {"changing/config.json": b"{2}"})
    with pytest.raises(CheckpointError, match="changed while it was downloaded"):
        download_objects(uri, tmp_path, files)
    download_objects(uri, tmp_path, object_files(uri))
    assert (tmp_path / "config.json").read_bytes() == b"{2}"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("models/nothing", "has no files of a checkpoint"),
        ("models/bad", "neither config.json nor a .gguf file found"),
        ("missing/chat", "Check the name, the credentials and the endpoint"),
        ("models/gguf/none.gguf", "Check the name"),
    ],
)
def test_a_uri_without_a_model_is_named(fetch: Fetch, scheme: str, tmp_path: Path, path: str, words: str) -> None:
    done = fetch(path)
    assert done.returncode == 2
    assert f"megatron-serve model fetch: {scheme}://{path}: " in done.stderr or path == "models/bad"
    assert words in done.stderr
    assert not (tmp_path / "model").exists()


class MetadataServer(BaseHTTPRequestHandler):
    """The part of the metadata server of Google's machines that pods with a workload identity use."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path.partition("?")[0], self.headers["Metadata-Flavor"]))
        body = json.dumps({"access_token": "of the pod", "expires_in": 3599, "token_type": "Bearer"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_without_keys_the_identity_of_the_pod_is_used(fetch: Fetch, server: GcsServer) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), MetadataServer) as metadata:
        Thread(target=metadata.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{metadata.server_port}"
        variables = {"GCE_METADATA_HOST": host, "GOOGLE_BASE_URL": server.url, "GOOGLE_SERVICE_ACCOUNT_KEY": None}
        done = fetch("models/chat/v1", **variables)
        metadata.shutdown()
    assert done.returncode == 0, done.stderr
    assert set(MetadataServer.asked) == {("/computeMetadata/v1/instance/service-accounts/default/token", "Google")}


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
