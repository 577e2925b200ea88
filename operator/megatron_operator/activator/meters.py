"""The metrics of an activator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

MODEL = ("namespace", "megatroninference")
"""Labels with namespace and name of the resource."""
DISCONNECTED = "disconnected"
"""Status of a request whose client left before the answer."""
WAITS = (0.5, 1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900)
"""Seconds; a model starts in ten seconds to some minutes."""


class ActivatorMeters:
    """The metrics of one activator. Only resources that exist have series, besides one without a name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "megatron_activator_requests",
            "Requests by resource and status of the answer; without a resource, those that named none.",
            [*MODEL, "status"],
            registry=self.registry,
        )
        self._waiting = Gauge(
            "megatron_activator_waiting_requests",
            "Requests that wait for a model to start.",
            MODEL,
            registry=self.registry,
        )
        self._wait = Histogram(
            "megatron_activator_wait_seconds",
            "Time that requests waited for a model, whether it was ready in time or not.",
            buckets=WAITS,
            registry=self.registry,
        )
        self._starts = Counter(
            "megatron_activator_starts",
            "Starts of models that were stopped because they were idle.",
            MODEL,
            registry=self.registry,
        )
        self._body_bytes = Gauge(
            "megatron_activator_body_bytes",
            "Bytes of the bodies of requests whose answers have not begun.",
            registry=self.registry,
        )

    def answered(self, namespace: str, name: str, status: str) -> None:
        """Count a request. Namespace and name are empty for a resource that does not exist."""
        self._requests.labels(namespace, name, status).inc()

    @contextmanager
    def waiting(self, namespace: str, name: str) -> Iterator[None]:
        """Measures the wait for a model."""
        began, waiting = time.perf_counter(), self._waiting.labels(namespace, name)
        waiting.inc()
        try:
            yield
        finally:
            waiting.dec()
            self._wait.observe(time.perf_counter() - began)

    def started(self, namespace: str, name: str) -> None:
        """Count a start of a model."""
        self._starts.labels(namespace, name).inc()

    def watch_bodies(self, held_bytes: Callable[[], int]) -> None:
        """Read the bytes of held bodies from this function at each scrape."""
        self._body_bytes.set_function(held_bytes)
