"""The check of a whole server in the program for machines with a GPU: its dry run, and wrong results."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REFUSAL = "--kv-cache-memory 65Gi: with 2.3Gi for the weights, ...; use 60Gi or less, or omit the size"


@pytest.fixture
def check(program: ModuleType) -> ModuleType:
    """The module of the check."""
    del program  # Its folder is in the path.
    return importlib.import_module("gpu_checks.server")


def test_the_dry_run_checks_a_whole_server(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.report(is_dry=True, word="server") == 0
    printed = capsys.readouterr().out
    rows = (
        r"ready +\| [\d.]+ s from exec",
        r"streams, 2 +\| [\d,]+ tokens/s +\| all answered +\| ok",
        r"answer around a suspension +\| the same 400 tokens, \d+ of them before it +\| the same +\| ok",
        r"memory given back +\| not measured without a GPU; suspend [\d.e-]+ s, resume [\d.e-]+ s",
        r"KV cache beyond the memory +\| exit code 2 .*, 0 restarts: --kv-cache-memory 1024Ti: .* \| ok",
        r"killed rank +\| all 2 streams whole [\d.]+ s after it +\| all answered +\| ok",
        r"an answer among others +\| the same 16 tokens, alone and among 3 others +\| the same +\| ok",
    )
    assert [row for row in rows if not re.search(rf"\| server: {row}", printed)] == []


def test_missing_packages_are_named_and_are_no_wrong_result(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.missing_packages() == []
    installed = importlib.metadata.distributions

    def without(name: str) -> Any:
        return iter(()) if name in ("fastapi", "llguidance") else installed(name=name)

    monkeypatch.setattr(importlib.metadata, "distributions", without)
    (row,) = check.measure(check.TOY)
    assert row.value == "not measured: fastapi, llguidance are not installed; pip install '.[runtime]'"
    assert not row.is_wrong


@pytest.mark.parametrize(("given_back", "taken", "is_wrong"), [(96, 97, False), (94, 97, True), (99, 94, True)])
def test_too_little_memory_is_wrong(check: ModuleType, given_back: int, taken: int, is_wrong: bool) -> None:
    row = check.judge_memory("memory", 10**9, given_back * 10**7, taken * 10**7, "suspend 1 s")
    assert row.is_wrong is is_wrong
    assert row.value == f"{given_back}.0% of 1 GB, {taken}.0% taken again; suspend 1 s"


@pytest.mark.parametrize(
    ("code", "message", "log", "is_wrong"),
    [
        (2, REFUSAL, "refused", False),
        (
            2,
            "the KV cache of 70 bytes can't be allocated on cuda:0 (out of\nmemory); lower kv_cache_memory_bytes",
            "",
            False,
        ),
        (1, REFUSAL, "", True),
        (2, "the KV cache can't be allocated; use another GPU", "", True),
        (2, "the KV cache of 70 bytes can't be allocated", "", True),
        (2, REFUSAL, "rank 0 ended with exit code 2; restarting it in 1.0 s", True),
    ],
)
def test_a_wrong_end_of_a_server_that_is_too_large_is_wrong(
    check: ModuleType, code: int, message: str, log: str, is_wrong: bool
) -> None:
    assert check.judge_refusal("too large", code, message, log, 1.0).is_wrong is is_wrong


def test_the_used_memory_is_that_of_the_first_visible_gpu(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\n[ "$*" = "--query-gpu=memory.used --format=csv,noheader,nounits -i 3" ] && echo 17\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert check.used_bytes() == 17 * 2**20


@contextmanager
def answering(response: bytes) -> Iterator[int]:
    """The port of a server that answers one request so."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(response)

        thread = threading.Thread(target=answer)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.usefixtures("check")
def test_short_late_and_refused_answers_are_errors() -> None:
    served = importlib.import_module("gpu_checks.served")
    ok = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    body = chunks(b'data: {"text":"t12t3"}\n\n', b'data: {"text":"', b't4"}\n\n')
    with answering(ok + body) as port:
        answers = served.read_answers(port, [[1]], 3)
    assert answers.require(3).tokens == [[b"t12", b"t3", b"t4"]]
    with pytest.raises(ValueError, match="1 of 1 streams had 3 of 4 tokens"):
        answers.require(4)
    with pytest.raises(ValueError, match="all answers of 3 tokens had ended before they were interrupted"):
        served.Answers(answers.tokens, 1.0, interrupted_after=3).require(3)
    with (
        answering(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n\r\nno engine") as port,
        pytest.raises(ValueError, match=r"^HTTP/1\.1 503 Service Unavailable: no engine$"),
    ):
        served.read_answers(port, [[1]], 3)
