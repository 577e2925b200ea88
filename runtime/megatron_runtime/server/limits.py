"""ASGI middleware around all routes: the size of bodies, and the count of answers."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_runtime.server.metrics import FrontendMetrics

LARGEST_BODY = 16 * 2**20
COUNTED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")


class BodyLimit:
    """Refuses bodies above 16 MiB with 413, whatever their header says about their length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, counting the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > LARGEST_BODY:
                # FastAPI passes only this kind of error on while it reads a body.
                raise HTTPException(413, f"the body has more than {LARGEST_BODY} bytes")
            return message

        await self._app(scope, limited, send)


class CountRequests:
    """Counts answers by path and status."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and notes the status of its answer."""
        if scope["type"] != "http" or scope["path"] not in COUNTED_PATHS:
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(scope["path"], str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, noted)
