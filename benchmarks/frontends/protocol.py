"""The protocol of all frontends under test: one JSON object per line, requests on stdin, answers on stdout.

    {"do": "load"} -> {"versions": {"package": "1.2.3"}}
    {"do": "run", "chat": true, ...the other fields of FrontendWorkload}
        -> {"seconds": 0.5, "cpu_seconds": 0.1, "events": 8192}

A contender has its frontend in one process, its backend in others, and its clients in the process that implements this
protocol.
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

from coordinators.protocol import TIMEOUT_SECONDS, cpu_seconds, keep_busy, opened
from peers.protocol import answer_requests, versions

MODEL = "echo"
TOKEN_TEXT = "!"
"""The text of each token of an answer; it appears nowhere else, so that clients can count tokens."""
SENTENCE = "The quick brown fox jumps over the lazy dog, and goes on until it is tired. "


@dataclass(frozen=True)
class FrontendWorkload:
    """The requests of the clients."""

    chat: bool
    """Whether to use chat completions instead of completions."""
    streaming: bool
    """Whether tokens are streamed, about a hundred per second; otherwise answers are complete."""
    prompt_sentences: int
    answer_tokens: int
    requests: int
    window: int
    """Number of outstanding requests."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        """The body of each request."""
        text = SENTENCE * self.prompt_sentences
        prompt = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        return {"model": MODEL, **prompt, "max_tokens": self.answer_tokens, "stream": self.streaming}


@dataclass(frozen=True)
class FrontendDeployment:
    """A running frontend."""

    frontend: int
    """Process id."""
    port: int
    """Its port on the loopback address."""


def serve(deploy: Callable[[], Awaitable[FrontendDeployment]], *packages: str) -> None:
    """Answers requests until stdin ends; ``packages`` are the distributions whose versions affect the results."""
    stands: list[FrontendDeployment] = []

    def load() -> dict[str, object]:
        stands.append(runner.run(opened(deploy())))
        return {"versions": versions(*packages) | {"python": sys.version.split()[0]}}

    def run(**fields: Any) -> dict[str, object]:
        return runner.run(_measure(stands[0], FrontendWorkload(**fields)))

    with asyncio.Runner() as runner:
        answer_requests({"load": load, "run": run})


async def _measure(deployment: FrontendDeployment, workload: FrontendWorkload) -> dict[str, object]:
    """Measures a turn, after one window of requests to open the connections and warm up."""
    connector = aiohttp.TCPConnector(limit=workload.window)
    async with (
        asyncio.timeout(TIMEOUT_SECONDS),
        aiohttp.ClientSession(f"http://127.0.0.1:{deployment.port}", connector=connector) as session,
    ):
        events: list[int] = []
        ask = partial(_ask, session, workload, events)
        await keep_busy(ask, range(workload.window), workload.window)
        events.clear()
        cpu, started = cpu_seconds(deployment.frontend), time.perf_counter()
        await keep_busy(ask, range(workload.requests), workload.window)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "cpu_seconds": cpu_seconds(deployment.frontend) - cpu, "events": len(events)}


async def _ask(session: aiohttp.ClientSession, workload: FrontendWorkload, events: list[int], _: int) -> None:
    """Sends one request; appends the number of tokens of each event with tokens to ``events``."""
    tokens = 0
    async with session.post(workload.path, json=workload.body()) as response:
        async for line in response.content:
            if new := line.count(TOKEN_TEXT.encode()):
                tokens += new
                events.append(new)
    if response.status != 200 or tokens != workload.answer_tokens:
        raise ValueError(
            f"received status {response.status} with {tokens} tokens instead of 200 with {workload.answer_tokens}"
        )
