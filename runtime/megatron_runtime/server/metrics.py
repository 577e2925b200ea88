"""What a frontend counts. In a pod the values live in files that the launcher adds up; see ``launch/metrics.py``."""

from __future__ import annotations

import time
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)


class FrontendMetrics:
    """One set per app. Names are part of the contract with the operator and with dashboards."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.requests = Counter("megatron_requests", "Answered requests", ["endpoint", "status"], registry=registry)
        self.prompt_tokens = Counter("megatron_prompt_tokens", "Tokens of prompts", registry=registry)
        self.cached_prompt_tokens = Counter(
            "megatron_cached_prompt_tokens", "Tokens of prompts that the prefix cache had", registry=registry
        )
        self.generation_tokens = Counter("megatron_generation_tokens", "Generated tokens", registry=registry)
        self.time_to_first_token = Histogram(
            "megatron_time_to_first_token_seconds", "From request to first token", buckets=_SECONDS, registry=registry
        )
        self.time_per_output_token = Histogram(
            "megatron_time_per_output_token_seconds",
            "Time after the first token, per token after the first",
            buckets=_SECONDS_PER_TOKEN,
            registry=registry,
        )
        self.request_duration = Histogram(
            "megatron_request_duration_seconds", "From request to last token", buckets=_SECONDS, registry=registry
        )


class ChoiceTimer:
    """Times one choice from its submission to its end."""

    def __init__(self, metrics: FrontendMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._tokens = 0
        metrics.prompt_tokens.inc(prompt_tokens)

    def __enter__(self) -> ChoiceTimer:
        return self

    def first_token(self) -> None:
        """To be called when a token has come; calls after the first have no effect."""
        if self._first_token is None:
            self._first_token = time.perf_counter()
            self._metrics.time_to_first_token.observe(self._first_token - self._started)

    def finish(self, tokens: int, cached_tokens: int) -> None:
        """To be called once with the number of generated tokens, and of those of the prompt that were cached."""
        self._tokens = tokens
        self._metrics.cached_prompt_tokens.inc(cached_tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = time.perf_counter()
        self._metrics.generation_tokens.inc(self._tokens)
        if kind is not None:
            return
        self._metrics.request_duration.observe(ended - self._started)
        if self._first_token is not None and self._tokens > 1:
            self._metrics.time_per_output_token.observe((ended - self._first_token) / (self._tokens - 1))
