"""All requests are answered while random processes of a pod are killed or stopped, with real processes and clients."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_support.chaos_harms import IDENTITIES, LAUNCHER, Harm
from runtime_support.chaos_jobs import Job, make_jobs
from runtime_support.chaos_trial import (
    COORDINATOR,
    DEADLINE,
    FRONTEND,
    LAYOUTS,
    MOST_AT_ONCE,
    RANK,
    Trial,
    endure,
    flags_of,
    random_harms,
    wait_for_all_groups,
)
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.repetition import is_long, repeated, seed_of_run

from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions

SEED_VARIABLE = "MEGATRON_CHAOS_SEED"
JOBS = repeated(150, 500)
AT_ONCE = 40
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
LONG_HARMS = 1000 // len(LAYOUTS) + 1
LONG_SECONDS = 3600.0 / len(LAYOUTS)


@pytest.fixture
def rng() -> random.Random:
    seed = seed_of_run(SEED_VARIABLE)
    print(f"{SEED_VARIABLE}={seed}")
    return random.Random(seed)


async def begin(start_pod: Callable[..., Any], folder: Path, layout: str, rng: random.Random) -> tuple[Any, list[Job]]:
    """A pod that is ready, and jobs for it."""
    checkpoint = write_tiny_checkpoint(folder / "tiny")
    pod = start_pod(*flags_of(checkpoint, layout))
    jobs = await asyncio.to_thread(make_jobs, checkpoint, rng, JOBS)
    await asyncio.to_thread(wait_for_all_groups, pod, layout)
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
    assert trial.defects(len(jobs), harms) == []


@pytest.mark.repetition
@pytest.mark.skipif(not is_long(), reason="takes an hour; see make test-long")
@pytest.mark.timeout(2 * LONG_SECONDS)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_no_request_is_lost_or_wrong_in_an_hour_of_kills_and_stalls(
    start_pod: Callable[..., Any], tmp_path: Path, rng: random.Random, layout: str
) -> None:
    pod, jobs = await begin(start_pod, tmp_path, layout, rng)
    trial = Trial(pod, rng, at_once=MOST_AT_ONCE)
    await trial.client.start()
    harms = random_harms(rng, LONG_HARMS)
    requests = await endure(trial, jobs, harms, LONG_SECONDS)
    assert trial.defects(requests, harms) == []
