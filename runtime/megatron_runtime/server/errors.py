"""Errors of the HTTP frontend, in the shape that OpenAI's clients read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

LONGEST_SHOWN_VALUE = 80


class ApiError(Exception):
    """An answer other than 2xx. ``param`` names the field of the body that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body; also what a stream carries when the error comes after its first byte."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The complete answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def unavailable(message: str, *, retry_after: int, code: str = "service_unavailable") -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(503, message, kind="service_unavailable_error", code=code, retry_after=retry_after)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every refusal of ``app`` an OpenAI error body; 422 never leaves it."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _from_validation(error.errors()).response()


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    response = ApiError(error.status_code, message, code=code).response()
    response.headers.update(error.headers or {})
    return response


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", kind="server_error").response()


def _from_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints, preferring the deepest: unions report one for every alternative."""
    nothing: Mapping[str, Any] = {"loc": (), "msg": "invalid body"}
    first: Mapping[str, Any] = max(errors, key=lambda error: len(_path(error["loc"])), default=nothing)
    if first.get("type") == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}", code="invalid_json"
        )
    path = _path(first["loc"])
    if first.get("type") == "extra_forbidden":
        return ApiError(400, f"{path[-1]}: unknown field; check its spelling or leave it out", param=".".join(path))
    text = str(first["msg"]).removeprefix("Value error, ")
    if not path:
        return ApiError(400, text, param=_leading_field(text))
    shown = "" if first.get("type") == "missing" else f" (got {_shorten(first.get('input'))})"
    return ApiError(400, f"{'.'.join(path)}: {text}{shown}", param=".".join(path))


def _leading_field(text: str) -> str | None:
    """The field that a complaint about the whole body starts with."""
    word = text.split(" ", 1)[0]
    return word if "_" in word else None


def _path(location: Sequence[str | int]) -> list[str]:
    """Names and positions inside the body, without pydantic's marks for the alternatives of a union."""
    return [
        str(part)
        for part in location
        if part != "body" and (isinstance(part, int) or part.isidentifier()) and part not in ("str", "int", "float")
    ]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN_VALUE else f"{text[:LONGEST_SHOWN_VALUE]}..."
