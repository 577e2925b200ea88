"""A trial of a service of several pods, whose processes are harmed under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from runtime_support.chaos_harms import Harm
from runtime_support.chaos_jobs import make_jobs
from runtime_support.chaos_trial import LOAD, MOST_AT_ONCE, Trial, endure, spec_of
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from suite_support.local_service import LocalService


async def harm_service(
    folder: Path,
    layout: str,
    rng: random.Random,
    jobs: int,
    harms: Sequence[Harm],
    seconds: float,
    load: float = LOAD,
) -> tuple[Trial, int]:
    """The trial, and the number of its requests.

    Args:
        folder: For files of the service.
        layout: One of LAYOUTS.
        rng: Chooses the requests, of which there are ``jobs`` different ones, and the victims.
        harms: To its processes, as in `endure`, with ``seconds`` and ``load``.
    """
    checkpoint = write_tiny_checkpoint(folder / "tiny")
    service = LocalService(folder, checkpoint, spec_of(layout))
    try:
        made = await asyncio.to_thread(make_jobs, checkpoint, rng, jobs)
        await asyncio.to_thread(service.wait_ready)
        trial = Trial(service, rng, at_once=MOST_AT_ONCE)
        await trial.client.start()
        return trial, await endure(trial, made, harms, seconds, load)
    finally:
        await asyncio.to_thread(service.end)
