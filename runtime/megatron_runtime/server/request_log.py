"""ASGI middleware around all other: request ids, request metrics and the access log.

The request id is the client's ``X-Request-Id``, or a generated one; the response always has it. The response and the
log also have the W3C trace context (``traceparent``), which is propagated to the engine.
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
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_runtime import tracing
from megatron_runtime.server.errors import ApiError, unexpected
from megatron_runtime.server.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Status for the log and the metrics when the client has closed the connection; the code is nginx's."""

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"
ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
"""Paths whose responses have the id under both names."""
_REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE_PATTERN = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-[\x21-\x7e]*)?"
)

COUNTED_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    *ANTHROPIC_PATHS,
    "/v1/embeddings",
    "/v1/score",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
)

Entry = Mapping[str, Any]
"""Fields of the log entry of a finished request; None where a field does not apply."""


class RequestLog:
    """Identifies, counts and logs requests, and answers those that failed unexpectedly.

    Args:
        app: The next app.
        metrics: Counts the requests.
        write: Gets the entry of each finished request; None disables the log.
        respond: Makes the response to a request with an unexpected error.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: FrontendMetrics,
        write: Callable[[Entry], None] | None,
        respond: Callable[[Request, ApiError], Response],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._write = write
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and observes its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        line = _RequestLine(scope)

        async def recorded(message: Message) -> None:
            line.record(message)
            await send(message)

        try:
            with line.span() as span:
                await self._app(scope, receive, recorded)
                tracing.note_answer(span, line.status)
        except Exception:
            logger.exception("%s %s failed (request %s)", scope["method"], line.path, line.request_id)
            if not line.has_begun:
                await self._respond(Request(scope), unexpected())(scope, receive, recorded)
        finally:
            self._end(line)

    def _end(self, line: _RequestLine) -> None:
        if line.counted_path is not None:
            self._metrics.requests.labels(line.counted_path, str(line.status)).inc()
        if self._write is not None:
            self._write(line.entry())


class _RequestLine:
    """One request and the progress of its response."""

    def __init__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        self.request_id = given if _REQUEST_ID_PATTERN.fullmatch(given) else secrets.token_hex(16)
        # For errors in the format of Anthropic's API, which have it in their body.
        scope.setdefault("state", {})["request_id"] = self.request_id
        self._headers = headers
        self._trace = _TRACE_PATTERN.fullmatch(headers.get(tracing.TRACE, ""))
        self._scope = scope
        self.path = str(scope["path"])
        self._started = time.perf_counter()
        self._status: int | None = None
        self._is_complete = False

    @property
    def counted_path(self) -> str | None:
        """The path, if it is one that is counted and traced; else None."""
        path = self.path if self.path in COUNTED_PATHS else f"/v1{self.path}"
        return path if path in COUNTED_PATHS else None

    def span(self) -> AbstractContextManager[Span]:
        """The span of this request; no span for paths that are not traced."""
        if self.counted_path is None:
            return nullcontext(INVALID_SPAN)
        return tracing.serving(self._scope["method"], self.counted_path, self._headers)

    @property
    def has_begun(self) -> bool:
        """Whether the status has been sent."""
        return self._status is not None

    @property
    def status(self) -> int:
        """The status of the response; 499 if the client closed the connection before its end."""
        if self._is_complete and self._status is not None:
            return self._status
        return CLIENT_CLOSED_REQUEST

    def record(self, message: Message) -> None:
        """Records a message of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID] = self.request_id
            if self.counted_path in ANTHROPIC_PATHS:
                headers[ANTHROPIC_REQUEST_ID] = self.request_id
            if self._trace is not None:
                headers[tracing.TRACE] = self._trace[0]
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)

    def entry(self) -> Entry:
        """The entry for the log."""
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
    """A function that writes entries in one of the formats ``options.ACCESS_LOGS``; None for ``off``."""
    return {"off": None, "text": _write_text, "json": _write_json}[form]


def _write_text(entry: Entry) -> None:
    fields = [f"{name}={value}" for name, value in entry.items() if name != "time" and value is not None]
    logger.info("%s", " ".join(fields))


def _write_json(entry: Entry) -> None:
    # Without the logger's prefix: the launcher passes such lines on unchanged.
    print(json.dumps({"log": "access", **entry}), flush=True)
