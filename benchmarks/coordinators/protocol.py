"""What every coordinator under test speaks: one JSON object a line, requests on stdin, answers on stdout.

    {"do": "load", "engines": 4, "block_size": 16} -> {"versions": {"package": "1.2.3"}, "streams": true}
    {"do": "run", "prefix_routing": false, ...the other fields of Workload}
        -> {"seconds": 0.5, "cpu_seconds": 0.1, "round_trips": [0.0004, ...]}

A contender has its coordinator in one process, all its engines in another, and its client in the process that answers
here. This file needs Python 3.11 and nothing else.
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

PATIENCE_SECONDS = 120
VOCABULARY = 32000
FAMILY = 8
"""Prompts that share their first half."""


@dataclass(frozen=True)
class Setup:
    """What a contender is to set up."""

    engines: int
    block_size: int
    """Tokens of a block that prefix routing hashes."""


@dataclass(frozen=True)
class Workload:
    """What a contender's client is to ask for, and how."""

    prefix_routing: bool
    """The coordinator looks for the engine that knows most of the prompt."""
    streaming: bool
    """Tokens come one by one, about a hundred steps of an engine a second; else all come at once."""
    prompt_tokens: int
    answer_tokens: int
    requests: int
    window: int
    """Requests that are outstanding at any time."""
    round_trips: int
    """Requests that are then made one after the other."""
    seed: int
    """Another one makes other prompts."""

    def prompts(self, count: int) -> Iterator[list[int]]:
        """Token ids; a few prompts at a time have their first half in common."""
        words = list(range(VOCABULARY)) * 2
        half = self.prompt_tokens // 2
        for index in range(count):
            shared = (7919 * self.seed + 613 * (index // FAMILY)) % VOCABULARY
            own = (104729 * self.seed + 37 * index + 11) % VOCABULARY
            yield words[shared : shared + half] + words[own : own + self.prompt_tokens - half]


class Stand(Protocol):
    """A coordinator that runs, with its engines and a client."""

    coordinator: int
    """Process id."""

    async def ask(self, prompt: list[int], answer_tokens: int) -> int:
        """One request from its submission to its answer; the number of tokens that came."""
        ...


@runtime_checkable
class StreamingStand(Stand, Protocol):
    """One that can pass on single tokens; for others there are no workloads with streams."""

    async def stream(self, prompt: list[int], answer_tokens: int) -> int:
        """As `ask`, token by token."""
        ...


Ask = Callable[[list[int], int], Awaitable[int]]


def serve(open_stand: Callable[[Setup, bool], Awaitable[Stand]], *packages: str) -> None:
    """Answer requests until stdin ends.

    Args:
        open_stand: Starts a coordinator, with prefix routing or without.
        packages: The distributions whose versions a result depends on.
    """
    stands: dict[bool, Stand] = {}

    def load(**setup: int) -> dict[str, object]:
        for prefix_routing in (False, True):
            stands[prefix_routing] = runner.run(opened(open_stand(Setup(**setup), prefix_routing)))
        streams = isinstance(stands[False], StreamingStand)
        return {"versions": versions(*packages) | {"python": sys.version.split()[0]}, "streams": streams}

    def run(**fields: int) -> dict[str, object]:
        workload = Workload(**fields)  # type: ignore[arg-type]
        return runner.run(_measure(stands[workload.prefix_routing], workload))

    with asyncio.Runner() as runner:
        answer_requests({"load": load, "run": run})


async def opened(stand: Awaitable[T]) -> T:
    """What is being started, which has to be there before patience is over."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await stand


async def _measure(stand: Stand, workload: Workload) -> dict[str, object]:
    """Both parts of a turn, after as many requests as the window holds, which wake everybody up."""
    trip = partial(_round_trip, _way_to_ask(stand, workload), workload)
    prompts = workload.prompts(workload.window + workload.requests + workload.round_trips)
    warm_up = [next(prompts) for _ in range(workload.window)]
    crowd = [next(prompts) for _ in range(workload.requests)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        await keep_busy(trip, warm_up, workload.window)
        cpu, started = cpu_seconds(stand.coordinator), time.perf_counter()
        await keep_busy(trip, crowd, workload.window)
        seconds, cpu = time.perf_counter() - started, cpu_seconds(stand.coordinator) - cpu
        trips = [await trip(prompt) for prompt in prompts]
    return {"seconds": seconds, "cpu_seconds": cpu, "round_trips": trips}


def _way_to_ask(stand: Stand, workload: Workload) -> Ask:
    if not workload.streaming:
        return stand.ask
    if isinstance(stand, StreamingStand):
        return stand.stream
    raise ValueError("this coordinator passes on no single tokens")


async def keep_busy(ask: Callable[[T], Awaitable[object]], questions: Iterable[T], window: int) -> None:
    """All questions, with as many outstanding as the window has room for."""
    left = iter(questions)

    async def one_after_the_other() -> None:
        for question in left:
            await ask(question)

    async with asyncio.TaskGroup() as group:
        for _ in range(window):
            group.create_task(one_after_the_other())


async def _round_trip(ask: Ask, workload: Workload, prompt: list[int]) -> float:
    started = time.perf_counter()
    tokens = await ask(prompt, workload.answer_tokens)
    seconds = time.perf_counter() - started
    if tokens != workload.answer_tokens:
        raise ValueError(f"{tokens} tokens came, not {workload.answer_tokens}")
    return seconds


def cpu_seconds(pid: int) -> float:
    """CPU that all threads of a process have used: on Linux the clock that clock_getcpuclockid(3) names."""
    return time.clock_gettime(~pid << 3 | 2)
