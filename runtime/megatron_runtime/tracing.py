"""OpenTelemetry traces: a span for each HTTP request, with a child span for each request to an engine.

The trace context (W3C ``traceparent`` and ``tracestate``) is propagated even if no spans are exported. Spans are
exported if an OTLP endpoint is set by OpenTelemetry's standard variables. Attributes follow OpenTelemetry's conventions
for HTTP and generative AI; latencies have vLLM's names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from megatron_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from megatron_runtime.inference_request import DynamicInferenceRequest

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE_NAME = "megatron-inference"
"""The default for ``OTEL_SERVICE_NAME``."""
TRACE = "traceparent"
"""W3C's header of the trace context."""

Carrier = dict[str, str]
"""A serialized trace context: W3C's headers by name, or empty."""

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("megatron_runtime")
_exports = False


def start() -> None:
    """Starts to export the spans of this process if an OTLP endpoint is set.

    Raises:
        ConfigurationError: An endpoint is set, but the exporter is not installed.
    """
    global _exports
    endpoint = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if endpoint is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            f"{endpoint} is set, but {error.name} is not installed: pip install 'megatron-inference[tracing]'",
            field=endpoint,
        ) from error
    names = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE_NAME}
    provider = TracerProvider(resource=Resource.create(names))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    _exports = True


def carrier() -> Carrier:
    """The current trace context, for a request to another process."""
    found: Carrier = {}
    if trace.get_current_span() is not trace.INVALID_SPAN:
        _propagator.inject(found)
    return found


@contextmanager
def serving(method: str, path: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
    """A context with the span of an HTTP request, in the trace of its headers.

    There is no span, and no cost, if spans are not exported and the request has no trace context.
    """
    if not _exports and TRACE not in headers:
        yield trace.INVALID_SPAN
        return
    with _tracer.start_as_current_span(
        f"{method} {path}",
        _propagator.extract(headers),
        kind=trace.SpanKind.SERVER,
        attributes={"http.request.method": method, "url.path": path},
    ) as span:
        yield span


def note_answer(span: trace.Span, status: int) -> None:
    """Records the HTTP status of a request."""
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(trace.StatusCode.ERROR)


def note_served(parent: Carrier, request: DynamicInferenceRequest) -> None:
    """Records how an engine served a request, as a finished span with the events of the request."""
    started = request.event_add_engine.timestamp if request.event_add_engine is not None else None
    if started is None or not _exports:
        return
    span = _tracer.start_span("engine request", _propagator.extract(parent), start_time=_nanoseconds(started))
    for event in request.events:
        if event.timestamp is not None:
            span.add_event(event.type.name, timestamp=_nanoseconds(event.timestamp))
    span.set_attributes(_attributes(request, started))
    if request.failed():
        span.set_status(trace.StatusCode.ERROR, request.finish_reason)
    span.end(_nanoseconds(started + (request.latency or 0.0)))


def _attributes(request: DynamicInferenceRequest, started: float) -> dict[str, Any]:
    prompt = request.total_tokens - len(request.generated_tokens)
    entered = [event.timestamp for event in request.events if event.type.name == "ADD_CONTEXT" and event.timestamp]
    known = {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": len(request.generated_tokens),
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.response.finish_reasons": [request.finish_reason] if request.finish_reason else None,
        "gen_ai.latency.time_in_queue": entered[0] - started if entered else None,
        "gen_ai.latency.time_to_first_token": request.ttft,
        "gen_ai.latency.e2e": request.latency,
    }
    return {name: value for name, value in known.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
