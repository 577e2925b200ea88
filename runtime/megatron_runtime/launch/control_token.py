"""ASGI middleware of the control API: authenticates clients by the headers, before anything reads a body."""

from __future__ import annotations

import hmac
import http
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_runtime.server.cross_origin import Refuse


class ControlToken:
    """Refuses requests without the control token with 401.

    Args:
        token: The bearer token that clients have to send; None trusts every client.
        open_paths: Paths that need no token.
        refuse: The response for a status, a code and a message.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, open_paths: Collection[str] = (), refuse: Refuse) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._open_paths = frozenset(open_paths)
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it."""
        app = self._app
        if scope["type"] == "http" and scope["path"] not in self._open_paths and not self._has_token(scope):
            message = "send the control token as Authorization: Bearer <token>"
            app = self._refuse(http.HTTPStatus.UNAUTHORIZED, "Unauthorized", message)
        await app(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "").encode()
        return self._expected is None or hmac.compare_digest(given, self._expected)
