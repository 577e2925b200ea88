"""What every frontend under test speaks: one JSON object a line, requests on stdin, answers on stdout.

    {"do": "load"} -> {"versions": {"package": "1.2.3"}}
    {"do": "run", "chat": true, ...the other fields of Workload}
        -> {"seconds": 0.5, "cpu_seconds": 0.1, "events": 8192}

A contender has its frontend in a process of its own, whatever is behind it in others, and the clients of both kinds of
contender in the process that answers here.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from coordinators.protocol import PATIENCE_SECONDS, cpu_seconds, keep_busy, opened
from peers.protocol import answer_requests, versions

MODEL = "echo"
TOKEN_TEXT = "!"
"""What each token of an answer stands for; nothing else in an answer has it, so that clients can count."""
SENTENCE = "The quick brown fox jumps over the lazy dog, and goes on until it is tired. "


@dataclass(frozen=True)
class Workload:
    """What the clients are to ask for, and how."""

    chat: bool
    """Chat completions; else completions."""
    streaming: bool
    """Tokens come one by one, about a hundred a second; else all come at once."""
    prompt_sentences: int
    answer_tokens: int
    requests: int
    window: int
    """Requests that are outstanding at any time."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The JSON of each request."""
        text = SENTENCE * self.prompt_sentences
        prompt = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        return {"model": MODEL, **prompt, "max_tokens": self.answer_tokens, "stream": self.streaming}


@dataclass(frozen=True)
class Stand:
    """A frontend that takes requests."""

    frontend: int
    """Process id."""
    port: int
    """Of the loopback."""


def serve(open_stand: Callable[[], Awaitable[Stand]], *packages: str) -> None:
    """Answer requests until stdin ends; ``packages`` are the distributions whose versions a result depends on."""
    stands: list[Stand] = []

    def load() -> dict[str, object]:
        stands.append(runner.run(opened(open_stand())))
        return {"versions": versions(*packages) | {"python": sys.version.split()[0]}}

    def run(**fields: Any) -> dict[str, object]:
        return runner.run(_measure(stands[0], Workload(**fields)))

    with asyncio.Runner() as runner:
        answer_requests({"load": load, "run": run})


async def _measure(stand: Stand, workload: Workload) -> dict[str, object]:
    """A turn, after as many requests as the window holds, which open the connections and wake everybody up."""
    connector = aiohttp.TCPConnector(limit=workload.window)
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        aiohttp.ClientSession(f"http://127.0.0.1:{stand.port}", connector=connector) as session,
    ):
        events: list[int] = []
        ask = partial(_ask, session, workload, events)
        await keep_busy(ask, range(workload.window), workload.window)
        events.clear()
        cpu, started = cpu_seconds(stand.frontend), time.perf_counter()
        await keep_busy(ask, range(workload.requests), workload.window)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "cpu_seconds": cpu_seconds(stand.frontend) - cpu, "events": len(events)}


async def _ask(session: aiohttp.ClientSession, workload: Workload, events: list[int], _: int) -> None:
    """One request; adds to ``events`` how many tokens each event has that has any."""
    tokens = 0
    async with session.post(workload.path, json=workload.body()) as response:
        async for line in response.content:
            if new := line.count(TOKEN_TEXT.encode()):
                tokens += new
                events.append(new)
    if response.status != 200 or tokens != workload.answer_tokens:
        raise ValueError(f"status {response.status} with {tokens} tokens came, not 200 with {workload.answer_tokens}")
