"""Traces of a real pod, as a collector receives them over OTLP."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

from megatron_runtime import tracing
from megatron_runtime.errors import ConfigurationError

CLIENT_TRACE, OTHER_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "1" * 32, "b7ad6b7169203331"
FLAGS = ("--kv-cache-memory", "8Mi", "--frontend-replicas", "1")


class Collector:
    """Receives what exporters send."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.news = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.receive(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def receive(self, request: ExportTraceServiceRequest) -> None:
        with self.news:
            for resource in request.resource_spans:
                named = {each.key: each.value.string_value for each in resource.resource.attributes}
                self.services.add(named["service.name"])
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            self.news.notify_all()

    def wait_for(self, name: str, *, trace: str = "", besides: Sequence[str] = ()) -> Span:
        """The newest span with this name, of one trace, or of none of these."""

        def found() -> list[Span]:
            named = [span for span in self.spans if span.name == name and span.trace_id.hex() not in besides]
            return [span for span in named if not trace or span.trace_id.hex() == trace]

        with self.news:
            assert self.news.wait_for(found, 30), [span.name for span in self.spans]
            return found()[-1]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collecting = Collector()
    yield collecting
    collecting.server.shutdown()
    collecting.server.server_close()


def values(span: Span) -> dict[str, Any]:
    """The attributes that are numbers or strings."""
    named: dict[str, Any] = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        if kind != "array_value":
            named[attribute.key] = getattr(attribute.value, kind)
    return named


def test_a_trace_spans_client_frontend_and_engine(
    start_pod: Callable[..., Any], tmp_path: Path, collector: Collector
) -> None:
    where = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    pod = start_pod("--model", str(write_tiny_checkpoint(tmp_path / "tiny")), *FLAGS, **where).wait_ready()
    asked = {"prompt": [1, 2, 3], "max_tokens": 7, "ignore_eos": True}
    pod.post("/v1/completions", asked, traceparent=f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01")
    served = collector.wait_for("POST /v1/completions", trace=CLIENT_TRACE)
    assert served.parent_span_id.hex() == CLIENT_SPAN
    assert values(served)["http.response.status_code"] == 200
    computed = collector.wait_for("engine request", trace=CLIENT_TRACE)
    assert computed.parent_span_id == served.span_id
    assert [event.name for event in computed.events] == ["ADD_ENGINE", "ADD_CONTEXT", "FINISH"]
    attributes = values(computed)
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (3, 7)
    assert 0 <= attributes["gen_ai.latency.time_in_queue"] <= attributes["gen_ai.latency.time_to_first_token"]
    assert attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
    assert served.start_time_unix_nano <= computed.start_time_unix_nano
    assert computed.end_time_unix_nano <= served.end_time_unix_nano
    assert collector.services == {"megatron-inference"}

    pod.post("/v1/completions", {"prompt": "a", "max_tokens": -1}, traceparent=f"00-{OTHER_TRACE}-{CLIENT_SPAN}-01")
    assert values(collector.wait_for("POST /v1/completions", trace=OTHER_TRACE))["http.response.status_code"] == 400
    with pod.http.stream("POST", "/v1/completions", json={"model": "chat", "stream": True, **asked}) as answer:
        answer.read()
    own = collector.wait_for("POST /v1/completions", besides=(CLIENT_TRACE, OTHER_TRACE))
    assert not own.parent_span_id
    assert collector.wait_for("engine request", trace=own.trace_id.hex()).parent_span_id == own.span_id
    assert {span.name for span in collector.spans} == {"POST /v1/completions", "engine request"}


def test_an_endpoint_without_an_exporter_is_refused_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"TRACES_ENDPOINT is set, but .* pip install .*\[tracing\]"):
        tracing.start()


def test_without_an_endpoint_the_trace_context_is_passed_on_unchanged() -> None:
    headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", "tracestate": "vendor=1"}
    with tracing.serving("POST", "/v1/completions", headers):
        assert tracing.carrier() == headers
    with tracing.serving("POST", "/v1/completions", {}):
        assert tracing.carrier() == {}
