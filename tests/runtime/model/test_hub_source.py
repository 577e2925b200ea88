"""Downloads from the Hugging Face hub, with its library and a small hub on loopback."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

COMMIT = "1" * 40
FIRST, SECOND = "Q8/model-Q8_0-00001-of-00002.gguf", "Q8/model-Q8_0-00002-of-00002.gguf"
FILES = {"model-Q4_K_M.gguf": b"GGUF a", FIRST: b"GGUF b", SECOND: b"GGUF c", "README.md": b"words"}


class Hub(BaseHTTPRequestHandler):
    """Serves FILES of the repository owner/quantized."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, has_body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        repo, _, rest = self.path[1:].partition("/resolve/")
        content = FILES.get(rest.partition("/")[2]) if repo == "owner/quantized" else None
        self.send_response(200 if content is not None else 404)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound" if repo == "owner/quantized" else "RepoNotFound")
        else:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if has_body and content:
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of the hub."""
    Hub.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def fetch(hub: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``megatron-serve model fetch``."""

    def fetch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "megatron_runtime.cli", "model", "fetch", *arguments],
            env=os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return fetch


@pytest.mark.parametrize(
    ("file", "parts"),
    [("model-Q4_K_M.gguf", ["model-Q4_K_M.gguf"]), (FIRST, [FIRST, SECOND]), (SECOND, [FIRST, SECOND])],
)
def test_the_parts_of_the_named_file_of_a_repository_are_downloaded_once(
    fetch: Callable[..., subprocess.CompletedProcess[str]], file: str, parts: list[str]
) -> None:
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = fetch("owner/quantized", "--file", file, "--revision", "v1", **environment)
        assert done.stdout.endswith(f"{parts[0]}\n"), done.stderr
        first = Path(done.stdout.strip())
        for part in parts:
            assert (first.parent / Path(part).name).read_bytes() == FILES[part]
    downloads = [asked for asked in Hub.asked if asked.startswith("GET /owner/")]
    assert downloads == [f"GET /owner/quantized/resolve/v1/{part}" for part in parts]


def test_a_file_or_repository_that_does_not_exist_is_named(
    fetch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = fetch("owner/quantized", "--file", "other.gguf")
    assert (done.returncode, done.stdout) == (2, "")
    assert "repository other.gguf of owner/quantized: has no such file. Check its name" in done.stderr
    assert "does not exist, or is private" in fetch("owner/missing", "--file", "other.gguf").stderr
    assert "--file other.gguf: requires the argument REPO" in fetch("--file", "other.gguf").stderr
