"""The memory of a rank during and after loads of many answers."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from runtime_support.resident_memory import peak_bytes, reset_peak, resident_bytes
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

from megatron_runtime.processes.idle_memory import GROWTH_BYTES, REST_SECONDS

BODIES, ANSWERS = 12, 128
LOADS, RETURNS = 6, 2
"""Several loads, since one may find most of its memory freed by the one before, or leave it in use for the next one."""
PATIENCE = 6 * REST_SECONDS


def ask(pod: Any, answers: int) -> None:
    body = {"prompt": [1, 2, 3], "n": answers, "max_tokens": 16, "ignore_eos": True}
    assert pod.post("/v1/completions", body).status_code == 200


def test_a_rank_returns_memory_after_many_answers_while_it_serves_few(start_pod: Any, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    flags = ["--dtype", "float32", "--frontend-replicas", "1", "--kv-cache-memory", "4Mi"]
    pod = start_pod("--model", str(checkpoint), *flags).wait_ready()
    rank = pod.child("megatron_runtime.rank")
    returned = 0
    for _ in range(LOADS):
        reset_peak(rank)
        pod.together(*[partial(ask, pod, ANSWERS)] * BODIES)
        returned += returns_memory(pod, rank)
        if returned == RETURNS:
            return
    raise AssertionError(f"the rank returned memory after {returned} of {LOADS} loads")


def returns_memory(pod: Any, rank: int) -> bool:
    """Whether at least half of the growth that is worth it is returned while the rank serves few answers."""
    deadline = time.monotonic() + PATIENCE
    while peak_bytes(rank) - resident_bytes(rank) < GROWTH_BYTES // 2:
        if time.monotonic() > deadline:
            return False
        ask(pod, 1)
    return True
