"""The page at ``/``, on which people chat with the model and see how the service stands.

Its files lie in ``page/`` as they are served. It uses the public API alone, and what it may load and run is fixed by
its policy: its own files, nothing inline, and no text that becomes HTML.
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
"""The last one lets browsers keep the files, and ask each time whether they are still the same."""


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
    """Files with the page's headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Starlette's own, which knows when a browser has the file already."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(HEADERS)
        return response
