"""An hour of kills and stalls of the processes of a service under `megatron-operator local`."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_support.chaos_trial import CANCELS_CONNECTIONS, LAYOUTS, SEED_VARIABLE, random_harms
from suite_support.repetition import is_long, rng_of_run
from suite_support.service_trial import harm_service

JOBS = 500
HARMS = 1000 // len(LAYOUTS) + 1
SECONDS = 3600.0 / len(LAYOUTS)


@CANCELS_CONNECTIONS
@pytest.mark.repetition
@pytest.mark.skipif(not is_long(), reason="takes an hour; see make test-long")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_no_request_is_lost_or_wrong_in_an_hour_of_kills_and_stalls(tmp_path: Path, layout: str) -> None:
    rng = rng_of_run(SEED_VARIABLE)
    harms = random_harms(rng, HARMS)
    trial, requests = await harm_service(tmp_path, layout, rng, JOBS, harms, SECONDS)
    assert trial.defects(requests, harms) == []
