"""The memory of a rank during and after a load of many answers."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from runtime_support.resident_memory import peak_bytes, resident_bytes
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

from megatron_runtime.processes.idle_memory import GROWTH_BYTES, REST_SECONDS

BODIES, ANSWERS = 6, 128
PATIENCE = 10 * REST_SECONDS
RETURNED = GROWTH_BYTES // 2
"""At least; passes of so many answers take several times as much, of which some is kept as it is used again."""


def ask(pod: Any, answers: int) -> None:
    body = {"prompt": [1, 2, 3], "n": answers, "max_tokens": 16, "ignore_eos": True}
    assert pod.post("/v1/completions", body).status_code == 200


def test_a_rank_returns_memory_after_many_answers_while_it_serves_few(start_pod: Any, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    flags = ["--dtype", "float32", "--frontend-replicas", "1", "--kv-cache-memory", "4Mi"]
    pod = start_pod("--model", str(checkpoint), *flags).wait_ready()
    rank = pod.child("megatron_runtime.rank")
    pod.together(*[partial(ask, pod, ANSWERS)] * BODIES)
    deadline = time.monotonic() + PATIENCE
    while peak_bytes(rank) - resident_bytes(rank) < RETURNED:
        assert time.monotonic() < deadline, f"it has {resident_bytes(rank)} bytes, and had {peak_bytes(rank)}"
        ask(pod, 1)
