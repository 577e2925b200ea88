"""All requests are answered while random processes of a pod are killed or stopped, with real processes and clients."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_support.chaos_crowd import Crowd
from runtime_support.chaos_harms import IDENTITIES, LAUNCHER, Harm, Reaper
from runtime_support.chaos_jobs import Job, make_jobs
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.repetition import is_long, repeated, seed_of_run

from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.inference_client import InferenceClient

SEED_VARIABLE = "MEGATRON_CHAOS_SEED"
JOBS = repeated(150, 500)
AT_ONCE = 40
RANK, COORDINATOR, FRONTEND = "megatron_runtime.rank", "coordinator_process", "server.frontend"
STALL_SECONDS = CoordinatorOptions.engine_timeout + 2
"""Seconds that a rank stays stopped: its requests move to others, but the launcher does not consider it hung yet."""
HARMS = (
    Harm(RANK),
    Harm(RANK, STALL_SECONDS),
    Harm(COORDINATOR),
    Harm(COORDINATOR, 3.0),
    Harm(FRONTEND),
    Harm(FRONTEND, 3.0),
    Harm(LAUNCHER, 3.0),
    Harm(IDENTITIES),
)
HANG_SECONDS = 10.0
SETTLING = 15.0
"""Seconds; less than the coordinator keeps requests of disconnected clients, because all clients reconnect here."""
DEADLINE = 240.0

LAYOUTS = {
    "replicas": ("--replica-groups", "3", "--routing-policy", "longest-prefix"),
    "tensor": ("--replica-groups", "2", "--tensor-parallel", "2"),
    "pipeline": ("--replica-groups", "2", "--pipeline-parallel", "2"),
}
LONG_HARMS = 1000 // len(LAYOUTS) + 1
LONG_SECONDS = 3600.0 / len(LAYOUTS)
STALLS = (1.0, 60.0)
LOAD = 0.3
"""The share of the requests that the pod can serve, as measured without harm."""
BURST = 100
"""Requests that begin together."""
LONG_AT_ONCE = 10 * BURST
LONG_VICTIMS = (RANK, COORDINATOR, FRONTEND, RANK, COORDINATOR, FRONTEND, LAUNCHER, IDENTITIES)


@pytest.fixture
def rng() -> random.Random:
    seed = seed_of_run(SEED_VARIABLE)
    print(f"{SEED_VARIABLE}={seed}")
    return random.Random(seed)


class Trial:
    """A pod with a load and a reaper."""

    def __init__(self, pod: Any, rng: random.Random, *, at_once: int) -> None:
        self.pod = pod
        self.client = InferenceClient(f"tcp://{pod.host}:5557", key=pod.key)
        self.crowd = Crowd(pod, self.client, rng, at_once=at_once, timeout=DEADLINE)
        self.reaper = Reaper(pod, rng)

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
            print(f"did {dict(self.reaper.done)}; the end of the pod's log:\n{self.pod.words()}")
            raise
        finally:
            self.client.stop()
            await self.crowd.close()
            self.report()

    def report(self) -> None:
        """Print what clients noticed."""
        crowd = self.crowd
        if crowd.waits:
            waits = ", ".join(f"p{share:.0%} {crowd.wait(share):.1f} s".replace("%", "") for share in (0.5, 0.99, 1))
            print(f"{len(crowd.answered)} requests, {self.reaper.done.total()} harms: {waits}; {dict(crowd.errors)}")

    def check(self, jobs: int, harms: Counter[Harm]) -> None:
        """No request was lost, answered twice or wrong, or taken for its aborted predecessor."""
        assert self.reaper.done == harms
        assert self.crowd.answered == dict.fromkeys(range(jobs), 1)
        assert not self.crowd.wrong
        assert not [error for error in self.crowd.errors if "aborted" in error]


async def begin(start_pod: Callable[..., Any], folder: Path, layout: str, rng: random.Random) -> tuple[Any, list[Job]]:
    """A pod that is ready, and jobs for it."""
    checkpoint = write_tiny_checkpoint(folder / "tiny")
    flags = ["--model", str(checkpoint), "--kv-cache-memory", "32Mi", "--dtype", "float32", "--max-restarts", "10000"]
    pod = start_pod(*flags, *LAYOUTS[layout], "--frontend-replicas", "2", "--hang-timeout", str(HANG_SECONDS))
    jobs = await asyncio.to_thread(make_jobs, checkpoint, rng, JOBS)
    groups = int(LAYOUTS[layout][1])
    await asyncio.to_thread(pod.wait_for, lambda state: state["ready"] and len(state["replicaGroups"]) == groups)
    return pod, jobs


@pytest.mark.timeout(330)
async def test_each_request_is_answered_once_and_correctly_while_processes_are_killed_or_stopped(
    start_pod: Callable[..., Any], tmp_path: Path, rng: random.Random
) -> None:
    pod, jobs = await begin(start_pod, tmp_path, "replicas", rng)
    trial = Trial(pod, rng, at_once=AT_ONCE)
    await trial.client.start()
    harms = rng.sample(HARMS, len(HARMS))

    async def pace(number: int) -> None:
        await trial.crowd.wait_for((number + 1) * len(jobs) // (len(harms) + 1))

    await trial.run(trial.crowd.ask_all(jobs), trial.reaper.run(harms, pace), limit=DEADLINE)
    trial.check(len(jobs), Counter(harms))


def endless(jobs: list[Job], is_over: Callable[[], bool]) -> Iterator[Job]:
    """The jobs again and again, each time under another number and so another key, in bursts until the end."""
    for number, job in enumerate(itertools.cycle(jobs)):
        if number % BURST == 0 and is_over():
            return
        yield replace(job, number=number)


def long_harms(rng: random.Random) -> list[Harm]:
    """In random order; half of the harms to a process that may be killed are stalls."""
    harms = []
    for victim, _ in zip(itertools.cycle(LONG_VICTIMS), range(LONG_HARMS), strict=False):
        is_stall = victim == LAUNCHER or (victim != IDENTITIES and rng.random() < 0.5)
        harms.append(Harm(victim, rng.uniform(*STALLS) if is_stall else None))
    rng.shuffle(harms)
    return harms


async def quiet_rate(trial: Trial, jobs: list[Job]) -> float:
    """Requests per second that the pod serves without harm."""
    began = time.monotonic()
    await trial.crowd.ask_all(jobs)
    return len(jobs) / (time.monotonic() - began)


@pytest.mark.repetition
@pytest.mark.skipif(not is_long(), reason="takes an hour; see make test-long")
@pytest.mark.timeout(2 * LONG_SECONDS)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_no_request_is_lost_or_wrong_in_an_hour_of_kills_and_stalls(
    start_pod: Callable[..., Any], tmp_path: Path, rng: random.Random, layout: str
) -> None:
    pod, jobs = await begin(start_pod, tmp_path, layout, rng)
    trial = Trial(pod, rng, at_once=LONG_AT_ONCE)
    await trial.client.start()
    seconds_per_burst = BURST / LOAD / await quiet_rate(trial, jobs)
    trial.crowd.restart()
    harms, began, last = long_harms(rng), time.monotonic(), 0

    async def pace_of_requests(job: Job) -> None:
        nonlocal last
        last = job.number
        if job.number % BURST == 0:
            await asyncio.sleep(began + job.number // BURST * seconds_per_burst - time.monotonic())

    async def pace_of_harms(_: int) -> None:
        await asyncio.sleep(LONG_SECONDS / len(harms))

    reaping = asyncio.create_task(trial.reaper.run(harms, pace_of_harms))
    await trial.run(
        trial.crowd.ask_all(endless(jobs, reaping.done), pace_of_requests), reaping, limit=1.9 * LONG_SECONDS
    )
    trial.check(last + 1, Counter(harms))
