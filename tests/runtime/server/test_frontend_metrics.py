"""The changes of every metric of a frontend by one answer."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_runtime.engine.worker.coordinator_connection import HEARTBEAT_SECONDS

pytestmark = pytest.mark.model

GENERATED = 8


def samples(pod: Any) -> dict[str, float]:
    """Values by name, summed over label sets."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(pod.control.get("/metrics").text):
        for sample in family.samples:
            name = f"{sample.name}:{sample.labels['reason']}" if "reason" in sample.labels else sample.name
            found[name] = found.get(name, 0.0) + sample.value
    return found


def settled_samples(pod: Any) -> dict[str, float]:
    """The samples once the rank has reported the answers of earlier tests, which it does with its heartbeats."""
    found, before = samples(pod), None
    while found != before:
        time.sleep(1.5 * HEARTBEAT_SECONDS)
        found, before = samples(pod), found
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_counted_and_timed(shared_pod: Any, stream: bool) -> None:
    before = settled_samples(shared_pod)
    asked = {"prompt": [19556] * 40, "max_tokens": GENERATED, "ignore_eos": True, "temperature": 0, "stream": stream}
    assert shared_pod.post("/v1/completions", asked).status_code == 200
    shared_pod.wait_for(
        lambda _: samples(shared_pod)["megatron_requests_total"] > before.get("megatron_requests_total", 0), seconds=10
    )
    shared_pod.wait_for(
        lambda _: (
            samples(shared_pod)["megatron_replica_group_generation_tokens_total"]
            >= before["megatron_replica_group_generation_tokens_total"] + GENERATED
        ),
        seconds=10,
    )
    after = samples(shared_pod)
    change = {name: value - before.get(name, 0.0) for name, value in after.items()}
    for histogram in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "request_duration_seconds",
        "queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert change[f"megatron_{histogram}_count"] == 1, histogram
    first, each, whole, queue = (
        change[f"megatron_{name}_seconds_sum"]
        for name in ("time_to_first_token", "time_per_output_token", "request_duration", "queue_time")
    )
    assert 0 <= queue <= first <= whole
    assert 0 < each * (GENERATED - 1) <= whole
    assert change["megatron_request_prompt_tokens_sum"] == change["megatron_prompt_tokens_total"] == 40
    assert change["megatron_request_generation_tokens_sum"] == change["megatron_generation_tokens_total"] == GENERATED
    assert change["megatron_finished_answers_total:length"] == 1
    assert change["megatron_requests_total"] == 1
    assert change["megatron_cached_prompt_tokens_total"] in (0, 32)
    assert change["megatron_replica_group_prompt_tokens_total"] == 40
    assert 0 <= after["megatron_kv_usage"] <= 1
