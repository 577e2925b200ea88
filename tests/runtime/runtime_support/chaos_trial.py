"""A pod under load while its processes are killed and stopped: for the chaos tests, and for `make chaos`."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from runtime_support.chaos_crowd import Crowd
from runtime_support.chaos_harms import IDENTITIES, LAUNCHER, Harm, Harmed, Reaper
from runtime_support.chaos_jobs import Job

from megatron_runtime.inference_client import InferenceClient

RANK, COORDINATOR, FRONTEND = "megatron_runtime.rank", "coordinator_process", "server.frontend"
SEED_VARIABLE = "MEGATRON_CHAOS_SEED"
HANG_SECONDS = 10.0
SETTLING = 15.0
"""Seconds; less than the coordinator keeps requests of disconnected clients, because all clients reconnect here."""
DEADLINE = 240.0

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 3, "routing": {"policy": "LongestPrefix"}},
    "tensor": {"replicas": 2, "parallelism": {"tensor": 2}},
    "pipeline": {"replicas": 2, "parallelism": {"pipeline": 2}},
}
"""Fields of the resource."""
STALLS = (1.0, 60.0)
"""Seconds, the shortest and the longest; half of the stalls are shorter than 8."""
LOAD = 0.3
BURST = 100
"""Requests that begin together."""
MOST_AT_ONCE = 10 * BURST
CANCELS_CONNECTIONS = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
"""Mark of tests with a trial: hasty clients disconnect at any time. anyio loses a connection if it is cancelled at the
moment at which it is established."""
VICTIMS = (*(5 * (RANK, COORDINATOR, FRONTEND)), LAUNCHER, IDENTITIES)


def spec_of(layout: str) -> dict[str, Any]:
    """The spec of the service for a trial, without its model. All groups restart soon, however often they failed."""
    spec = LAYOUTS[layout]
    ranks = math.prod(spec.get("parallelism", {}).values())
    extra = ["--hang-timeout", str(HANG_SECONDS), "--threads-per-rank", "1"]
    return {
        **spec,
        "pods": {"device": "cpu", "ranksPerPod": ranks},
        "engine": {"kvCacheMemory": "32Mi", "extraArgs": extra},
        "frontend": {"replicas": 2},
        "failurePolicy": {"maxRestarts": 1000, "backoff": "1s", "maxBackoff": "5s"},
    }


class Trial:
    """A pod, or a service of several pods, with a load and a reaper."""

    def __init__(self, harmed: Harmed, rng: random.Random, *, at_once: int) -> None:
        self.harmed = harmed
        self.client = InferenceClient(harmed.coordinator, key=harmed.key)
        self.crowd = Crowd(harmed.url, self.client, rng, at_once=at_once, timeout=DEADLINE)
        self.reaper = Reaper(harmed, rng)

    async def run(self, *work: Awaitable[object], limit: float) -> None:
        """Returns when the work is done and no request is outstanding."""
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*work)
            # The engines drop requests of a frontend that was killed at the end once its loss is detected.
            async with asyncio.timeout(SETTLING):
                while (await self.client.service_state()).outstanding_requests:
                    pass
        except BaseException:
            print(f"did {dict(self.reaper.done)}; the end of the log:\n{self.harmed.words()}")
            raise
        finally:
            self.client.stop()
            await self.crowd.close()
            gc.collect()  # lost connections, while the mark above applies
            self.report()

    def report(self) -> None:
        """Print what clients noticed."""
        crowd = self.crowd
        if crowd.waits:
            waits = ", ".join(f"p{share:.0%} {crowd.wait(share):.1f} s".replace("%", "") for share in (0.5, 0.99, 1))
            print(f"{len(crowd.answered)} requests, {self.reaper.done.total()} harms: {waits}; {dict(crowd.errors)}")

    def defects(self, jobs: int, harms: Sequence[Harm]) -> list[str]:
        """Requests that were lost, answered twice or wrong, or taken for their aborted predecessors; empty if all is
        well."""
        found = []
        if (done := self.reaper.done) != (planned := Counter(harms)):
            found.append(f"other harms were done than planned: {done - planned} more, {planned - done} less")
        answered = self.crowd.answered
        if lost := sorted(set(range(jobs)) - answered.keys()):
            found.append(f"requests without an answer: {lost}")
        if wild := {number: count for number, count in answered.items() if count != 1 or not 0 <= number < jobs}:
            found.append(f"requests with several answers, or never sent, and the numbers of their answers: {wild}")
        found += [f"a wrong answer to {job}: {answer!r}" for job, answer in self.crowd.wrong]
        if aborted := {error: count for error, count in self.crowd.errors.items() if "aborted" in error}:
            found.append(f"retries that were taken for the aborted first try: {aborted}")
        return found


async def endure(trial: Trial, jobs: Sequence[Job], harms: Sequence[Harm], seconds: float, load: float = LOAD) -> int:
    """Do the harms at equal intervals in about ``seconds``, while bursts of requests are the load of the pod.

    Requests go on until the last harm is over.

    Args:
        load: The share of the requests that the pod can serve, as measured before, without harm.

    Returns:
        The number of requests.
    """
    seconds_per_burst = BURST / load / await _quiet_rate(trial, jobs)
    trial.crowd.restart()
    began, last = time.monotonic(), 0

    async def pace_of_requests(job: Job) -> None:
        nonlocal last
        last = job.number
        if job.number % BURST == 0:
            await asyncio.sleep(began + job.number // BURST * seconds_per_burst - time.monotonic())

    async def pace_of_harms(_: int) -> None:
        await asyncio.sleep(seconds / len(harms))

    reaping = asyncio.create_task(trial.reaper.run(harms, pace_of_harms))
    asking = trial.crowd.ask_all(_endless(jobs, reaping.done), pace_of_requests)
    await trial.run(asking, reaping, limit=1.5 * seconds + 2 * DEADLINE)
    return last + 1


def random_harms(rng: random.Random, count: int) -> list[Harm]:
    """In random order; half of the harms to processes are stalls, whose lengths are distributed log-uniformly."""
    harms = []
    for victim in itertools.islice(itertools.cycle(VICTIMS), count):
        is_stall = victim != IDENTITIES and rng.random() < 0.5
        harms.append(Harm(victim, math.exp(rng.uniform(*map(math.log, STALLS))) if is_stall else None))
    rng.shuffle(harms)
    return harms


async def _quiet_rate(trial: Trial, jobs: Sequence[Job]) -> float:
    """Requests per second that the pod serves without harm."""
    began = time.monotonic()
    await trial.crowd.ask_all(jobs)
    return len(jobs) / (time.monotonic() - began)


def _endless(jobs: Sequence[Job], is_over: Callable[[], bool]) -> Iterator[Job]:
    """The jobs again and again, each time under another number and so another key, in bursts until the end."""
    for number, job in enumerate(itertools.cycle(jobs)):
        if number % BURST == 0 and is_over():
            return
        yield replace(job, number=number)
