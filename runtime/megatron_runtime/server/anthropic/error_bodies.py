"""Errors in the format of Anthropic's API."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from megatron_runtime.server.errors import ApiError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The JSON body, which is also the last event of a stream that fails after its first byte."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    details = {"type": _KINDS.get(error.status, other), "message": error.message}
    return {"type": "error", "error": details, "request_id": request_id}


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """The complete HTTP response."""
    response = error.response()
    request_id = request.state.request_id
    headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
    return JSONResponse(error_body(error, request_id), status_code=error.status, headers=headers)
