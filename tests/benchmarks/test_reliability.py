"""The benchmark of reliability: the results of its load with a failing endpoint, and the table."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ANSWER = "The capital of France is Paris."


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "cluster"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def table() -> ModuleType:
    return importlib.import_module("chaos.table")


def outcome(number: int, **changes: Any) -> Any:
    module = importlib.import_module("chaos.outcome")
    line = {"number": number, "streamed": False, "question": 0, "at": 100.0 + number, "seconds": 0.5, "retries": 0}
    return module.RequestOutcome.of({**line, "text": ANSWER, "errors": [], **changes})


def error(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "APIConnectionError",
        "status": None,
        "message": "",
        "retryable": True,
        "interrupted": False,
        **changes,
    }


def trial(outcomes: list[Any], history: list[tuple[float, str]]) -> Any:
    module = importlib.import_module("chaos.trial")
    faults, watch = importlib.import_module("chaos.faults"), importlib.import_module("chaos.watch")
    fault = faults.Fault("test", "a test", lambda _: None)
    return module.Trial(fault, 100.0, outcomes, [watch.Health(at, problems) for at, problems in history])


def test_a_row_has_the_errors_of_programs_and_the_time_until_all_is_ready(table: ModuleType) -> None:
    interrupted = error(kind="RemoteProtocolError", interrupted=True)
    outcomes = [
        outcome(0, seconds=6.0, retries=2),
        outcome(1, streamed=True, seconds=2.0, errors=[interrupted]),
        outcome(2, errors=[error(kind="InternalServerError", status=503)]),
        outcome(3),
    ]
    history = [(99.0, "before"), (101.0, ""), (102.0, "1/2"), (103.0, ""), (104.0, "1/2"), (107.5, ""), (108.0, "")]
    baseline = trial([outcome(0, seconds=2.0)], [(101.0, "")])
    header, first, second = table.rows([trial(outcomes, history)], baseline, {0: ANSWER})
    assert dict(zip(header, first, strict=True))["until all is Ready, s"] == "stayed"
    assert second == [
        "a test",
        "4",
        "4",
        "1",
        "1 InternalServerError 503",
        "1 RemoteProtocolError",
        "6.0",
        "3.0",
        "7.5",
    ]


def test_wrong_and_missing_answers_and_final_errors_are_violations(table: ModuleType) -> None:
    outcomes = [
        outcome(0, text="Paris"),
        outcome(1, text=None, errors=[error()]),
        outcome(2, errors=[error(kind="BadRequestError", status=400, retryable=False)]),
    ]
    assert table.verdict([trial(outcomes, [])], {0: ANSWER}) == [
        "a test: 1 wrong answers",
        "a test: 1 requests without an answer",
        "a test: 1 errors that do not permit a retry (1 BadRequestError 400 (final))",
    ]
    assert table.verdict([trial([outcome(0)], [])], {0: ANSWER}) == []


def test_an_incomplete_line_is_ignored() -> None:
    module = importlib.import_module("chaos.outcome")
    fields = {"number": 1, "streamed": True, "question": 0, "at": 1.0, "seconds": 1.0, "text": None, "retries": 0}
    line = json.dumps({**fields, "errors": []})
    assert module.read([f"{line}\n", line[:40]]) == [outcome(1, streamed=True, at=1.0, seconds=1.0, text=None)]


class Endpoint:
    """An endpoint whose first requests fail in different ways: busy, interrupted, ended early without an error."""

    def __init__(self) -> None:
        self.streams = 0
        self.wholes = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked["stream"]:
            self.streams += 1
            return await self._stream(request, self.streams)
        self.wholes += 1
        if self.wholes == 1:
            return web.json_response({"error": {"message": "busy"}}, status=503, headers={"Retry-After": "0.1"})
        message = {"role": "assistant", "content": ANSWER}
        return web.json_response({"id": "1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def _stream(self, request: web.Request, number: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._send(response, {"content": "The capital "}, None)
        if number == 1:
            assert request.transport is not None
            request.transport.abort()
        elif number > 2:
            await self._send(response, {"content": ANSWER.removeprefix("The capital ")}, "stop")
        return response

    async def _send(self, response: web.StreamResponse, delta: dict[str, str], finish: str | None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        await response.write(f"data: {json.dumps({'id': '1', 'choices': [choice]})}\n\n".encode())


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The URL of an Endpoint."""
    application = web.Application()
    application.router.add_post("/v1/chat/completions", Endpoint().chat)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


async def test_the_load_reports_retries_of_the_client_and_errors(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [sys.executable, BENCHMARKS / "chaos" / "load.py", url, out, "2", "0.1"]
    await asyncio.to_thread(subprocess.run, words, check=True, timeout=60)
    module = importlib.import_module("chaos.outcome")
    whole, stream = sorted(module.read(out.read_text().splitlines(keepends=True)), key=lambda each: each.number)
    assert (whole.text, whole.retries, whole.errors) == (ANSWER, 1, ())
    assert (stream.text, stream.streamed, stream.retries) == (ANSWER, True, 0)
    torn, short = stream.errors
    assert (torn.retryable, torn.interrupted) == (True, True)
    assert (short.kind, short.retryable, short.interrupted) == ("TruncatedStreamError", False, True)
