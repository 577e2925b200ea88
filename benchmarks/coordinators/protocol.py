"""The protocol of all coordinators under test: one JSON object per line, requests on stdin, answers on stdout.

    {"do": "load", "engines": 4, "block_size": 16} -> {"versions": {"package": "1.2.3"}, "streams": true}
    {"do": "run", "prefix_routing": false, ...the other fields of CoordinatorWorkload}
        -> {"seconds": 0.5, "cpu_seconds": 0.1, "round_trips": [0.0004, ...]}

A contender has its coordinator in one process, all its engines in another, and its client in the process that
implements this protocol. This file requires only Python 3.11.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from peers.protocol import answer_requests, versions

T = TypeVar("T")

TIMEOUT_SECONDS = 120
VOCABULARY = 32000
FAMILY = 8
"""Number of prompts with the same first half."""


@dataclass(frozen=True)
class CoordinatorSetup:
    """Configuration of a contender."""

    engines: int
    block_size: int
    """Tokens per block that prefix routing hashes."""


@dataclass(frozen=True)
class CoordinatorWorkload:
    """The requests of a contender's client."""

    prefix_routing: bool
    """Whether the coordinator selects the engine with the longest cached prefix."""
    streaming: bool
    """Whether tokens are streamed, about a hundred per second; otherwise answers are complete."""
    prompt_tokens: int
    answer_tokens: int
    requests: int
    window: int
    """Number of outstanding requests."""
    round_trips: int
    """Number of requests that are then sent one after the other."""
    seed: int
    """Seed of the prompts."""

    def prompts(self, count: int) -> Iterator[list[int]]:
        """Token ids; FAMILY consecutive prompts have the same first half."""
        words = list(range(VOCABULARY)) * 2
        half = self.prompt_tokens // 2
        for index in range(count):
            shared = (7919 * self.seed + 613 * (index // FAMILY)) % VOCABULARY
            own = (104729 * self.seed + 37 * index + 11) % VOCABULARY
            yield words[shared : shared + half] + words[own : own + self.prompt_tokens - half]


class CoordinatorDeployment(Protocol):
    """A running coordinator with its engines and a client."""

    coordinator: int
    """Process id."""

    async def ask(self, prompt: list[int], answer_tokens: int) -> int:
        """Runs one request; returns the number of tokens of the answer."""
        ...


@runtime_checkable
class StreamingDeployment(CoordinatorDeployment, Protocol):
    """One that can stream tokens; others have no workloads with streams."""

    async def stream(self, prompt: list[int], answer_tokens: int) -> int:
        """Like `ask`, but streams the tokens."""
        ...


Ask = Callable[[list[int], int], Awaitable[int]]


def serve(deploy: Callable[[CoordinatorSetup, bool], Awaitable[CoordinatorDeployment]], *packages: str) -> None:
    """Answers requests until stdin ends.

    Args:
        deploy: Starts a coordinator with or without prefix routing.
        packages: Distributions whose versions affect the results.
    """
    deployments: dict[bool, CoordinatorDeployment] = {}

    def load(**setup: int) -> dict[str, object]:
        for prefix_routing in (False, True):
            deployments[prefix_routing] = runner.run(opened(deploy(CoordinatorSetup(**setup), prefix_routing)))
        streams = isinstance(deployments[False], StreamingDeployment)
        return {"versions": versions(*packages) | {"python": sys.version.split()[0]}, "streams": streams}

    def run(**fields: int) -> dict[str, object]:
        workload = CoordinatorWorkload(**fields)  # type: ignore[arg-type]
        return runner.run(_measure(deployments[workload.prefix_routing], workload))

    with asyncio.Runner() as runner:
        answer_requests({"load": load, "run": run})


async def opened(deployment: Awaitable[T]) -> T:
    """Waits for a start, with a timeout."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await deployment


async def _measure(deployment: CoordinatorDeployment, workload: CoordinatorWorkload) -> dict[str, object]:
    """Measures both parts of a turn, after one window of requests to warm up."""
    trip = partial(_round_trip, _request_function(deployment, workload), workload)
    prompts = workload.prompts(workload.window + workload.requests + workload.round_trips)
    warm_up = [next(prompts) for _ in range(workload.window)]
    crowd = [next(prompts) for _ in range(workload.requests)]
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await keep_busy(trip, warm_up, workload.window)
        cpu, started = cpu_seconds(deployment.coordinator), time.perf_counter()
        await keep_busy(trip, crowd, workload.window)
        seconds, cpu = time.perf_counter() - started, cpu_seconds(deployment.coordinator) - cpu
        trips = [await trip(prompt) for prompt in prompts]
    return {"seconds": seconds, "cpu_seconds": cpu, "round_trips": trips}


def _request_function(deployment: CoordinatorDeployment, workload: CoordinatorWorkload) -> Ask:
    if not workload.streaming:
        return deployment.ask
    if isinstance(deployment, StreamingDeployment):
        return deployment.stream
    raise ValueError("this coordinator does not stream tokens")


async def keep_busy(ask: Callable[[T], Awaitable[object]], questions: Iterable[T], window: int) -> None:
    """Sends all requests, up to ``window`` of them at a time."""
    left = iter(questions)

    async def one_after_the_other() -> None:
        for question in left:
            await ask(question)

    async with asyncio.TaskGroup() as group:
        for _ in range(window):
            group.create_task(one_after_the_other())


async def _round_trip(ask: Ask, workload: CoordinatorWorkload, prompt: list[int]) -> float:
    started = time.perf_counter()
    tokens = await ask(prompt, workload.answer_tokens)
    seconds = time.perf_counter() - started
    if tokens != workload.answer_tokens:
        raise ValueError(f"received {tokens} tokens instead of {workload.answer_tokens}")
    return seconds


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process: on Linux the clock of clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)
