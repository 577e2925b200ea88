"""Metrics of a frontend. In a pod the values are in files that the launcher sums up; see ``launch/metrics.py``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

if TYPE_CHECKING:
    from megatron_runtime.inference_request import DynamicInferenceRequest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)


class FrontendMetrics:
    """One set per app. The names are part of the contract with the operator and with dashboards."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.requests = Counter(
            "megatron_requests", "HTTP requests by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self.prompt_tokens = Counter("megatron_prompt_tokens", "Prompt tokens", registry=registry)
        self.cached_prompt_tokens = Counter(
            "megatron_cached_prompt_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.generation_tokens = Counter("megatron_generation_tokens", "Generated tokens", registry=registry)
        self.time_to_first_token = Histogram(
            "megatron_time_to_first_token_seconds",
            "Time from the request to the first token; measured by the engine if the answer is not streamed",
            buckets=_SECONDS,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "megatron_time_per_output_token_seconds",
            "Mean time per output token after the first",
            buckets=_SECONDS_PER_TOKEN,
            registry=registry,
        )
        self.request_duration = Histogram(
            "megatron_request_duration_seconds",
            "Time from the request to the last token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_time = Histogram(
            "megatron_queue_time_seconds",
            "Time in the engine's queue, until the first step that computes for the request",
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_prompt_tokens = Histogram(
            "megatron_request_prompt_tokens", "Prompt tokens per request", buckets=_TOKENS, registry=registry
        )
        self.request_generation_tokens = Histogram(
            "megatron_request_generation_tokens", "Generated tokens per answer", buckets=_TOKENS, registry=registry
        )
        self.finished = Counter(
            "megatron_finished_answers", "Finished answers by finish reason", ["reason"], registry=registry
        )


class ChoiceTimer:
    """Measures one choice from its creation to its end."""

    def __init__(self, metrics: FrontendMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        metrics.prompt_tokens.inc(prompt_tokens)

    def first_token(self) -> None:
        """Call it when a token arrives; calls after the first have no effect."""
        if self._first_token is None:
            self._first_token = time.perf_counter()
            self._metrics.time_to_first_token.observe(self._first_token - self._started)

    def count(self, request: DynamicInferenceRequest) -> None:
        """Call it once, with the engine's result."""
        metrics = self._metrics
        self._tokens = len(request.generated_tokens)
        metrics.generation_tokens.inc(self._tokens)
        metrics.cached_prompt_tokens.inc(request.num_cached_tokens)
        metrics.finished.labels(request.finish_reason or "error").inc()
        metrics.request_prompt_tokens.observe(self._prompt_tokens)
        metrics.request_generation_tokens.observe(self._tokens)
        waited = _queue_seconds(request)
        if waited is not None:
            metrics.queue_time.observe(waited)
        if self._first_token is None and request.ttft is not None:
            metrics.time_to_first_token.observe(request.ttft)
            if request.latency is not None and self._tokens > 1:
                metrics.time_per_output_token.observe((request.latency - request.ttft) / (self._tokens - 1))

    def stop(self) -> None:
        """Call it after ``count`` when the result is not an error."""
        ended = time.perf_counter()
        self._metrics.request_duration.observe(ended - self._started)
        if self._first_token is not None and self._tokens > 1:
            self._metrics.time_per_output_token.observe((ended - self._first_token) / (self._tokens - 1))


def _queue_seconds(request: DynamicInferenceRequest) -> float | None:
    """Measured by the engine; None for a request that was never computed."""
    begins = (event.timestamp for event in request.events if event.type.name == "ADD_CONTEXT")
    begun = next(begins, None)
    added = None if request.event_add_engine is None else request.event_add_engine.timestamp
    return None if begun is None or added is None else max(0.0, begun - added)
