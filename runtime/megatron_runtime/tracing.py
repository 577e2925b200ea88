"""Traces by OpenTelemetry: a span for each HTTP request, and below it one for each request that an engine served.

The context of a trace is passed on whether or not spans are exported from here; W3C's ``traceparent`` and
``tracestate``. Spans are exported when the standard variable of an OTLP endpoint is set, by the SDK with its own
variables. Names of attributes are those of OpenTelemetry's conventions for HTTP and generative AI; the latencies have
the names that vLLM gives them.
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
"""Unless ``OTEL_SERVICE_NAME`` says otherwise."""
TRACE = "traceparent"
"""W3C's header of a trace."""

Carrier = dict[str, str]
"""The context of a trace as it travels: W3C's headers by their names, or nothing."""

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("megatron_runtime")
_exports = False


def start() -> None:
    """Export this process's spans from now on, if the environment says where to.

    Raises:
        ConfigurationError: It does, but what exports them is not installed.
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
    """The context that this code runs in, for a request that leaves the process."""
    found: Carrier = {}
    if trace.get_current_span() is not trace.INVALID_SPAN:
        _propagator.inject(found)
    return found


@contextmanager
def serving(method: str, path: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
    """Run what serves an HTTP request, within the trace that its headers belong to.

    Where nothing is exported, and there is no trace to pass on, it costs nothing.
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
    """The HTTP status with which a request ended."""
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(trace.StatusCode.ERROR)


def note_served(parent: Carrier, request: DynamicInferenceRequest) -> None:
    """Tell, as a span that is over, how an engine served a request; its events are those of the request."""
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
