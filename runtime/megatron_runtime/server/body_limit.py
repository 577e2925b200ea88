"""ASGI middleware around all routes: limits the sizes of request bodies and the time to receive them."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_runtime.server.freed_memory import FreedMemory
from megatron_runtime.server.held_bodies import CLOSE, HeldBodies, check_size
from megatron_runtime.server.options import HttpOptions

LAST_READ_SECONDS = 1.0
"""After a stall of the process, a time limit ends before the event loop has read what arrived meanwhile."""


class BodyLimit:
    """Rejects a body that is too large with 413, independent of Content-Length, one that takes too long with 408, and
    one beyond the limit of all bodies together with 429 or 503, see ``HeldBodies``."""

    def __init__(self, app: ASGIApp, options: HttpOptions) -> None:
        self._app = app
        self._options = options
        self._freed = FreedMemory()
        self._held = HeldBodies(options.max_total_body_bytes, options.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and counts the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit, seconds = self._options.max_body_bytes, self._options.body_timeout
        loop = asyncio.get_running_loop()
        deadline, last_read = loop.time() + seconds, LAST_READ_SECONDS
        body = self._held.body((scope.get("client") or ("",))[0])
        complete = False

        async def limited() -> Message:
            nonlocal deadline, last_read, complete
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
                raise HTTPException(408, f"the body was not received within {seconds:g} seconds", CLOSE) from None
            count = len(message.get("body", b""))
            complete = not message.get("more_body", False)
            check_size(body.size + count, limit)
            body.add(count)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._freed.request_ended(body.size)
            body.release()
