"""The memory of a rank during and after loads of many answers."""

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
RETURNED = (GROWTH_BYTES // 8, GROWTH_BYTES // 2)
"""At least, after each load: the first one leaves much that is used again, and the next one takes 12 MiB beyond it."""


def ask(pod: Any, answers: int) -> None:
    body = {"prompt": [1, 2, 3], "n": answers, "max_tokens": 16, "ignore_eos": True}
    assert pod.post("/v1/completions", body).status_code == 200


def test_a_rank_returns_memory_after_many_answers_while_it_serves_few(start_pod: Any, tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny")
    flags = ["--dtype", "float32", "--frontend-replicas", "1", "--kv-cache-memory", "4Mi"]
    pod = start_pod("--model", str(checkpoint), *flags).wait_ready()
    rank = pod.child("megatron_runtime.rank")
    for returned in RETURNED:
        pod.together(*[partial(ask, pod, ANSWERS)] * BODIES)
        deadline = time.monotonic() + PATIENCE
        while (size := peak_bytes(rank) - resident_bytes(rank)) < returned:
            assert time.monotonic() < deadline, f"{size} of {peak_bytes(rank)} bytes are returned, not {returned}"
            ask(pod, 1)
