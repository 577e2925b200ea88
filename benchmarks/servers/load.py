"""Loads of a server: as many streams as it can serve at once, and arrivals at a fixed rate."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from servers.server import MODEL
from servers.streams import Stream

Result = TypeVar("Result")

_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class Work:
    """Requests of one load. Each has a random prompt, so that no server finds it in its prefix cache."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    token_ids: range
    """Those that prompts consist of."""

    def bodies(self, seed: int) -> list[bytes]:
        """The bodies of the requests, the same for the same seed."""
        draw = random.Random(seed)
        fields = {"model": MODEL, "max_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        prompts = (draw.choices(self.token_ids, k=self.prompt_tokens) for _ in range(self.requests))
        return [json.dumps(fields | {"prompt": prompt}).encode() for prompt in prompts]


@dataclass(frozen=True)
class LoadTimes:
    """What the clients saw of one load, in seconds."""

    seconds: float
    """From the first request to the end of the last answer."""
    tokens: int
    """Generated tokens of all answers."""
    first: list[float]
    """From the time when each request was due to its first token."""
    further: list[float]
    """The mean time of the tokens after the first one, of each answer."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def saturate(port: int, work: Work, window: int, seed: int) -> LoadTimes:
    """``window`` requests at once: each next one is due when an answer ends.

    Raises:
        ValueError: An answer had another status than 200, or another number of tokens.
    """
    return asyncio.run(_saturate(port, work, window, seed))


def arrive(port: int, work: Work, rate: float, seed: int) -> LoadTimes:
    """``rate`` requests per second at random times (Poisson), whether or not earlier ones are answered.

    Raises:
        ValueError: An answer had another status than 200, or another number of tokens.
    """
    draw = random.Random(seed)
    gaps = (draw.expovariate(rate) for _ in range(work.requests - 1))
    return asyncio.run(_arrive(port, work, list(itertools.accumulate(gaps, initial=0.0)), seed))


async def _saturate(port: int, work: Work, window: int, seed: int) -> LoadTimes:
    bodies, start = iter(work.bodies(seed)), time.perf_counter()
    clients = [_ask_in_turn(port, bodies) for _ in range(window)]
    answers = itertools.chain.from_iterable(await _together(clients))
    return _times(list(answers), start, work)


async def _arrive(port: int, work: Work, times: Sequence[float], seed: int) -> LoadTimes:
    bodies, start = work.bodies(seed), time.perf_counter()
    answers = [_Answer(port, start + due).read(body) for due, body in zip(times, bodies, strict=True)]
    return _times(await _together(answers), start, work)


class _Answer:
    """A stream that is read from the time on when it is due."""

    def __init__(self, port: int, due: float) -> None:
        self._stream, self._due = Stream(port), due

    async def read(self, body: bytes) -> _Answer:
        await asyncio.sleep(self._due - time.perf_counter())
        await self._stream.read(body)
        return self

    @property
    def tokens(self) -> int:
        """The number of tokens, as the server counts them."""
        found = _COUNT.findall(self._stream.body())
        return int(found[-1]) if found else 0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self._stream.arrivals[0] - self._due

    @property
    def seconds(self) -> float:
        """Seconds from the first token to the last one."""
        return self._stream.arrivals[-1] - self._stream.arrivals[0]


async def _ask_in_turn(port: int, bodies: Iterator[bytes]) -> list[_Answer]:
    return [await _Answer(port, time.perf_counter()).read(body) for body in bodies]


async def _together(clients: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client) for client in clients]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _times(answers: Sequence[_Answer], start: float, work: Work) -> LoadTimes:
    seconds = time.perf_counter() - start
    if wrong := [count for answer in answers if (count := answer.tokens) != work.new_tokens]:
        raise ValueError(f"{len(wrong)} of {len(answers)} answers had {wrong[0]} of {work.new_tokens} tokens")
    first = [answer.first for answer in answers]
    further = [answer.seconds / max(1, work.new_tokens - 1) for answer in answers]
    return LoadTimes(seconds, len(answers) * work.new_tokens, first, further)
