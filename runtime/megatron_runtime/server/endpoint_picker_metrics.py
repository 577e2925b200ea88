"""The load of the service for endpoint pickers of the Gateway API Inference Extension, by vLLM's names.

The model server protocol of the extension has the names, types and meanings. Each frontend passes requests on to all
replica groups, so a frontend's load is the mean of the groups, the same in every pod.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_runtime.wire.service_state import ServiceState

KV_USAGE = "KV cache usage, 1 means 100 percent"


class EndpointPickerMetrics(Collector):
    """One series per metric, with the served name as the label ``model_name``."""

    def __init__(self, service: ServiceState, served_name: str, max_loras: int, *, names_adapters: bool = True) -> None:
        """``names_adapters``: whether the names of adapters, which may be those of tenants, are among the labels."""
        self._service = service
        self._served_name = served_name
        self._max_loras = max_loras
        self._adapters = [each.name for each in service.adapters] if names_adapters else []

    def collect(self) -> Iterator[Metric]:
        """Queue, running requests, KV cache usage, and the adapters, all of which every replica group has."""
        engines = self._service.engines
        groups = max(len(engines), 1)
        waiting = sum(each.waiting for each in engines) + self._service.unassigned_requests
        used, total = (sum(getattr(each, name) for each in engines) for name in ("kv_blocks_used", "kv_blocks_total"))
        usage = used / max(total, 1)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue, per replica group", waiting / groups)
        running = sum(each.running for each in engines)
        yield self._gauge("vllm:num_requests_running", "Requests in the batch, per replica group", running / groups)
        yield self._gauge("vllm:kv_cache_usage_perc", KV_USAGE, usage)
        # The name until vLLM 0.10, which pickers of that time read.
        yield self._gauge("vllm:gpu_cache_usage_perc", KV_USAGE, usage)
        adapters = {
            "max_lora": str(self._max_loras),
            "running_lora_adapters": ",".join(self._adapters),
            "waiting_lora_adapters": "",
        }
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Loaded adapters, as of this time", labels=tuple(adapters)
        )
        family.add_metric(tuple(adapters.values()), time.time())
        yield family

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=("model_name",))
        family.add_metric((self._served_name,), value)
        return family
