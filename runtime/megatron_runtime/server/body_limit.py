"""ASGI middleware around all routes: limits the size of request bodies and the time to receive them."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_runtime.server.options import HttpOptions

LAST_READ_SECONDS = 1.0
"""After a stall of the process, a time limit ends before the event loop has read what arrived meanwhile."""
_CLOSE = {"Connection": "close"}
"""Close the connection instead of reading the rest of such a body to find the next request."""


class BodyLimit:
    """Rejects a body that is too large with 413, independent of Content-Length, and one that takes too long with
    408."""

    def __init__(self, app: ASGIApp, options: HttpOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and counts the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit, seconds = self._options.max_body_bytes, self._options.body_timeout
        loop = asyncio.get_running_loop()
        deadline, last_read = loop.time() + seconds, LAST_READ_SECONDS
        received = 0
        complete = False

        async def limited() -> Message:
            nonlocal deadline, last_read, received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                if last_read:
                    deadline, last_read = loop.time() + last_read, 0.0
                    return await limited()
                # While FastAPI reads a body, it passes on only this type of exception.
                raise HTTPException(408, f"the body was not received within {seconds:g} seconds", _CLOSE) from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > limit:
                raise HTTPException(413, f"the body has more than {limit} bytes", _CLOSE)
            return message

        await self._app(scope, limited, send)
