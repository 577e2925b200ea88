"""Protects HTTP servers on a user's machine from requests that web pages make a browser send."""

from __future__ import annotations

import http
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Refuse = Callable[[int, str, str], Response]
_CHANGING = ("POST", "PUT", "PATCH", "DELETE")


class SameOriginOnly:
    """ASGI middleware: refuses requests of pages from elsewhere, and to names that are not this server's.

    ``Origin``, which browsers add, has to be this server. A request that changes something needs a JSON body or none:
    browsers send other types without asking first.

    Args:
        is_local: Whether the server listens on a loopback address. ``Host`` then has to be an IP address or
            ``localhost``: a page can give its own domain name this address (DNS rebinding), and has no other for it.
        refuse: The response for a status, a code and a message.
    """

    def __init__(self, app: ASGIApp, *, is_local: bool, refuse: Refuse) -> None:
        self._app = app
        self._is_local = is_local
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it."""
        app = self._app
        if scope["type"] == "http" and (defect := self._defect(scope["method"], Headers(scope=scope))) is not None:
            app = self._refuse(*defect)
        await app(scope, receive, send)

    def _defect(self, method: str, headers: Headers) -> tuple[int, str, str] | None:
        host = headers.get("host", "")
        if self._is_local and not _is_local_name(host):
            message = f"Host: {host} is not a name of this server; use its IP address or localhost"
            return http.HTTPStatus.MISDIRECTED_REQUEST, "UnknownHost", message
        if is_cross_origin(headers):
            message = f"Origin: {headers['origin']}: pages from elsewhere can't use this API"
            return http.HTTPStatus.FORBIDDEN, "CrossOrigin", message
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method in _CHANGING and kind not in ("", "application/json"):
            message = f"Content-Type: {kind}: send application/json, or no body"
            return http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", message
        return None


def _is_local_name(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname if host else ""
    if not name or name == "localhost":
        return True  # HTTP/1.0 has no Host, and no browser sends it
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_cross_origin(headers: Headers) -> bool:
    """Whether a page that was not loaded from this server has caused the request."""
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
