"""All requests are answered while random processes of a pod are killed or stopped, with real processes and clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_support.chaos_harms import IDENTITIES, LAUNCHER, Harm
from runtime_support.chaos_jobs import make_jobs
from runtime_support.chaos_trial import (
    CANCELS_CONNECTIONS,
    COORDINATOR,
    DEADLINE,
    FRONTEND,
    HANG_SECONDS,
    RANK,
    SEED_VARIABLE,
    Trial,
)
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.repetition import rng_of_run

from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions

JOBS = 150
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
FLAGS = ("--replica-groups", "3", "--routing-policy", "longest-prefix", "--frontend-replicas", "2")


@CANCELS_CONNECTIONS
@pytest.mark.timeout(330)
async def test_each_request_is_answered_once_and_correctly_while_processes_are_killed_or_stopped(
    start_pod: Callable[..., Any], tmp_path: Path
) -> None:
    rng = rng_of_run(SEED_VARIABLE)
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    engine = ("--kv-cache-memory", "32Mi", "--dtype", "float32", "--hang-timeout", str(HANG_SECONDS))
    pod = start_pod("--model", str(checkpoint), *engine, "--max-restarts", "10000", *FLAGS)
    jobs = await asyncio.to_thread(make_jobs, checkpoint, rng, JOBS)
    await asyncio.to_thread(pod.wait_for, lambda state: state["ready"] and len(state["replicaGroups"]) == 3)
    trial = Trial(pod, rng, at_once=AT_ONCE)
    await trial.client.start()
    harms = rng.sample(HARMS, len(HARMS))

    async def pace(number: int) -> None:
        await trial.crowd.wait_for((number + 1) * len(jobs) // (len(harms) + 1))

    await trial.run(trial.crowd.ask_all(jobs), trial.reaper.run(harms, pace), limit=DEADLINE)
    assert trial.defects(len(jobs), harms) == []
