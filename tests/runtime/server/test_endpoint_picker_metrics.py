"""The metrics of the model server protocol of the Gateway API Inference Extension."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatron_runtime.server.endpoint_picker_metrics import EndpointPickerMetrics
from megatron_runtime.wire.service_state import EngineView, ServiceState

NAMES = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:lora_requests_info",
}


def engine(group: int, running: int, waiting: int, used: int, total: int) -> EngineView:
    return EngineView(group, 0, "RUNNING", running, waiting, total, used, 0, 0, 0.0, 0, False, True)


def exposed(*engines: EngineView, unassigned: int = 0) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and value by name; a picker reads one series of each metric."""
    service = ServiceState("RUNNING", 1, "e", engines, unassigned, 0, 0, 0)
    registry = CollectorRegistry()
    registry.register(EndpointPickerMetrics(service, "chat"))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {family.type for family in families} == {"gauge"}
    (samples,) = zip(*(family.samples for family in families), strict=True)
    return {sample.name: (sample.labels, sample.value) for sample in samples}


def test_the_load_is_the_mean_of_the_replica_groups() -> None:
    found = exposed(engine(0, 8, 4, 30, 100), engine(1, 6, 0, 10, 100), unassigned=2)
    assert found.keys() == NAMES
    of_chat = {"model_name": "chat"}
    assert found["vllm:num_requests_waiting"] == (of_chat, 3.0)
    assert found["vllm:num_requests_running"] == (of_chat, 7.0)
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == (of_chat, 0.2)


def test_no_adapters_are_loaded_as_of_now() -> None:
    before = time.time()
    labels, value = exposed(engine(0, 0, 0, 0, 100))["vllm:lora_requests_info"]
    assert labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert before <= value <= time.time()


def test_requests_without_an_engine_wait() -> None:
    found = exposed(unassigned=5)
    assert found["vllm:num_requests_waiting"][1] == 5.0
    assert found["vllm:kv_cache_usage_perc"][1] == pytest.approx(0.0)
