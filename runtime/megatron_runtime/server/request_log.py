"""ASGI middleware around everything else: a name for each request, a count of how it ended, and a line in the log.

The name is the client's ``X-Request-Id``, or one of our own, and is in the answer either way. A trace context
(``traceparent``, as W3C has it) is in the answer and in the log too, so that both can be found from the trace, and
goes on to the engine.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_runtime import tracing
from megatron_runtime.server.errors import unexpected
from megatron_runtime.server.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's code for the log and the metrics; nobody is left to read the answer."""

REQUEST_ID = "x-request-id"
_REQUEST_ID_FORM = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE_FORM = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-[\x21-\x7e]*)?"
)

COUNTED_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
)

Entry = Mapping[str, Any]
"""What is known of a request that has ended, None where there is nothing to tell."""


class RequestLog:
    """Names, counts and logs requests. ``write`` takes each one's entry when it has ended; None writes no log."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics, write: Callable[[Entry], None] | None) -> None:
        self._app = app
        self._metrics = metrics
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, and follows its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _RequestLine(scope)

        async def noted(message: Message) -> None:
            call.note(message)
            await send(message)

        try:
            with call.span() as span:
                await self._app(scope, receive, noted)
                tracing.note_answer(span, call.status)
        except Exception:
            logger.exception("%s %s failed (request %s)", scope["method"], call.path, call.request_id)
            if not call.has_begun:
                await unexpected().response()(scope, receive, noted)
        finally:
            self._end(call)

    def _end(self, call: _RequestLine) -> None:
        if call.counted_path is not None:
            self._metrics.requests.labels(call.counted_path, str(call.status)).inc()
        if self._write is not None:
            self._write(call.entry())


class _RequestLine:
    """One request and how far its answer is."""

    def __init__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        self.request_id = given if _REQUEST_ID_FORM.fullmatch(given) else secrets.token_hex(16)
        self._headers = headers
        self._trace = _TRACE_FORM.fullmatch(headers.get(tracing.TRACE, ""))
        self._scope = scope
        self.path = str(scope["path"])
        self._started = time.perf_counter()
        self._status: int | None = None
        self._is_over = False

    @property
    def counted_path(self) -> str | None:
        """What it asks for, if that is worth counting and tracing."""
        path = self.path if self.path in COUNTED_PATHS else f"/v1{self.path}"
        return path if path in COUNTED_PATHS else None

    def span(self) -> AbstractContextManager[Span]:
        """Of the trace that the request belongs to, while it is served."""
        if self.counted_path is None:
            return nullcontext(INVALID_SPAN)
        return tracing.serving(self._scope["method"], self.counted_path, self._headers)

    @property
    def has_begun(self) -> bool:
        """Whether the client has got a status."""
        return self._status is not None

    @property
    def status(self) -> int:
        """The answer's status; 499 if the client did not stay to its end, whatever it began with."""
        if self._is_over and self._status is not None:
            return self._status
        return CLIENT_CLOSED_REQUEST

    def note(self, message: Message) -> None:
        """Take part of the answer, on its way to the client."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID] = self.request_id
            if self._trace is not None:
                headers[tracing.TRACE] = self._trace[0]
        elif message["type"] == "http.response.body":
            self._is_over = not message.get("more_body", False)

    def entry(self) -> Entry:
        """What the log should say."""
        client = self._scope.get("client")
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": self._scope["method"],
            "path": self.path,
            "status": self.status,
            "seconds": round(time.perf_counter() - self._started, 4),
            "client": None if client is None else client[0],
            "request_id": self.request_id,
            "trace_id": None if self._trace is None else self._trace[1],
            "parent_span_id": None if self._trace is None else self._trace[2],
        }


def access_log(form: str) -> Callable[[Entry], None] | None:
    """What writes entries in one of ``options.ACCESS_LOGS``; None for ``off``."""
    return {"off": None, "text": _write_text, "json": _write_json}[form]


def _write_text(entry: Entry) -> None:
    words = [f"{name}={value}" for name, value in entry.items() if name != "time" and value is not None]
    logger.info("%s", " ".join(words))


def _write_json(entry: Entry) -> None:
    # A line of its own, without the logger's words before it: the launcher passes such lines on as they are.
    print(json.dumps({"log": "access", **entry}), flush=True)
