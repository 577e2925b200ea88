"""The metrics of the model server protocol of the Gateway API Inference Extension."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megatron_runtime.server.endpoint_picker_metrics import EndpointPickerMetrics
from megatron_runtime.wire.service_state import AdapterView, EngineView, ServiceState

NAMES = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:lora_requests_info",
}


def engine(group: int, running: int, waiting: int, used: int, total: int) -> EngineView:
    return EngineView(group, 0, "RUNNING", running, waiting, total, used, 0, 0, 0.0, 0, False, True)


ADAPTERS = (AdapterView("org/sql", "/sql"), AdapterView("poems", "/poems"))


def exposed(
    *engines: EngineView, unassigned: int = 0, adapters: tuple[AdapterView, ...] = (), names_adapters: bool = True
) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and value by name; a picker reads one series of each metric."""
    service = ServiceState("RUNNING", 1, "e", engines, unassigned, 0, 0, 0, adapters)
    registry = CollectorRegistry()
    registry.register(EndpointPickerMetrics(service, "chat", 3, names_adapters=names_adapters))
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


@pytest.mark.parametrize(("names_adapters", "names"), [(True, "org/sql,poems"), (False, "")])
def test_the_adapters_are_those_of_now(names_adapters: bool, names: str) -> None:
    before = time.time()
    found = exposed(engine(0, 0, 0, 0, 100), adapters=ADAPTERS, names_adapters=names_adapters)
    labels, value = found["vllm:lora_requests_info"]
    assert labels == {"max_lora": "3", "running_lora_adapters": names, "waiting_lora_adapters": ""}
    assert before <= value <= time.time()


def test_requests_without_an_engine_wait() -> None:
    found = exposed(unassigned=5)
    assert found["vllm:num_requests_waiting"][1] == 5.0
    assert found["vllm:kv_cache_usage_perc"][1] == pytest.approx(0.0)
