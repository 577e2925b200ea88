"""Downloads from the Hugging Face hub, with its library and a small hub on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from suite_support.loopback_hub import LoopbackHub

FIRST, SECOND = "Q8/model-Q8_0-00001-of-00002.gguf", "Q8/model-Q8_0-00002-of-00002.gguf"
FILES = {"model-Q4_K_M.gguf": b"GGUF a", FIRST: b"GGUF b", SECOND: b"GGUF c", "README.md": b"words"}

Fetch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    """A hub with GGUF files."""
    with LoopbackHub("owner/quantized", FILES).serving() as hub:
        yield hub


@pytest.fixture
def fetch(hub: LoopbackHub, tmp_path: Path) -> Fetch:
    """Runs ``megatron-serve model fetch``."""

    def fetch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "megatron_runtime.cli", "model", "fetch", *arguments],
            env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"} | environment,
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
    fetch: Fetch, hub: LoopbackHub, file: str, parts: list[str]
) -> None:
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        done = fetch("owner/quantized", "--file", file, "--revision", "v1", **environment)
        assert done.stdout.endswith(f"{parts[0]}\n"), done.stderr
        first = Path(done.stdout.strip())
        for part in parts:
            assert (first.parent / Path(part).name).read_bytes() == FILES[part]
    downloads = [asked for asked in hub.asked if asked.startswith("GET /owner/")]
    assert downloads == [f"GET /owner/quantized/resolve/v1/{part}" for part in parts]


def test_a_file_or_repository_that_does_not_exist_is_named(fetch: Fetch) -> None:
    done = fetch("owner/quantized", "--file", "other.gguf")
    assert (done.returncode, done.stdout) == (2, "")
    assert "repository other.gguf of owner/quantized: has no such file. Check its name" in done.stderr
    assert "does not exist, or is private" in fetch("owner/missing", "--file", "other.gguf").stderr
    assert "--file other.gguf: requires the argument REPO" in fetch("--file", "other.gguf").stderr
