"""The web page at ``/``, to chat with the model and to monitor the service.

The files in ``page/`` are served as they are. The page uses only the public API. Its content security policy allows
only its own files, no inline code, and no text that is interpreted as HTML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "page"

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""``no-cache`` lets browsers keep the files but revalidate them with every request."""


def add_page(app: FastAPI) -> None:
    """Serves the page at ``/`` and its files below ``/page``."""
    files = _PageFiles(directory=FOLDER)
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.include_router(router)
    app.mount("/page", files)


class _PageFiles(StaticFiles):
    """Static files with the page's headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Starlette's response, which is 304 for a file that is unchanged."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response
