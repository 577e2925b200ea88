"""The commands of the docs that start servers, as a reader pastes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime_support.adapters import write_adapter
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell
from transformers import AutoModelForCausalLM

ADDRESS = "http://127.0.0.1:8000"
"""That of the servers in the docs."""
TOKEN = "control-token-of-the-reader"


@pytest.fixture
def host(new_host: Callable[[], str]) -> str:
    return new_host()


@pytest.fixture
def reader(host: str, tmp_path: Path) -> DocShell:
    """A reader whose servers have an address of the tests."""
    variables = {"MEGATRON_BIND_HOST": host, "MEGATRON_CONTROL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    return DocShell(tmp_path / "reader", **variables)


@contextmanager
def serving(reader: DocShell, command: str, host: str, log: Path) -> Iterator[httpx.Client]:
    """A client of the server that the command starts, once it is ready."""
    with (
        reader.running(command, log) as process,
        httpx.Client(base_url=f"http://{host}:8000", trust_env=False, timeout=60) as client,
    ):
        while True:
            assert process.poll() is None, log.read_text()
            try:
                if client.get("/ready").is_success:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield client


@pytest.mark.model
def test_the_sample_model_is_where_the_server_looks_for_it(reader: DocShell, smollm2_path: Path) -> None:
    fetch, serve, _, _ = documented("docs/command-line.md", "megatron-serve model fetch")
    reader.keep_models(smollm2_path.parent)
    assert reader.run(fetch.command) == reader.run(f"echo {serve.words[2]}")


def test_two_groups_of_four_ranks_answer(reader: DocShell, host: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    *_, serve, check = documented("docs/command-line.md", "megatron-serve model fetch")
    (reader.checkout / "PATH").symlink_to(tiny_checkpoint)
    assert reader.run(check.command)
    with serving(reader, serve.command, host, tmp_path / "log") as client:
        (model,) = client.get("/v1/models").json()["data"]
        body = {"model": model["id"], "prompt": "a", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 4


def test_adapters_are_loaded_and_unloaded(reader: DocShell, host: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    serve, load, unload = documented("docs/http-api.md", "megatron-serve")
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    for name in ("legal", "sql", "poems"):
        write_adapter(tmp_path / "adapters" / name, base)
    reader.environment |= {"MODEL": str(tiny_checkpoint), "TOKEN": TOKEN}

    def here(command: str) -> str:
        return command.replace(ADDRESS, f"http://{host}:8000").replace("/adapters/", f"{tmp_path}/adapters/")

    with serving(reader, here(serve.command), host, tmp_path / "log") as client:

        def names() -> list[str]:
            return [model["id"] for model in client.get("/v1/models").json()["data"]]

        assert reader.run(here(load.command)) == load.output.strip()
        assert names() == ["smollm2", "legal", "poems", "sql"]
        assert reader.run(here(unload.command)) == unload.output.strip()
        assert names() == ["smollm2", "legal", "sql"]
