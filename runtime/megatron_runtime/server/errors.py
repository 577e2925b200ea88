"""Errors of the HTTP frontend, in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException

LONGEST_SHOWN_VALUE = 80

CONTEXT_EXCEEDED = "This model's maximum context length was exceeded."
"""In the message of an error because of a prompt that is too long: clients of Megatron's server search for it."""

_CODES = {404: "not_found", 405: "method_not_allowed", 408: "body_timeout", 413: "body_too_large"}


class ApiError(Exception):
    """A response other than 2xx. ``param`` names the field of the body that caused it."""

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
        """The JSON body; also the last event of a stream that fails after its first byte."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The complete HTTP response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def unavailable(message: str, *, retry_after: int, code: str = "service_unavailable") -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(503, message, kind="service_unavailable_error", code=code, retry_after=retry_after)


def context_exceeded(error: Exception) -> ApiError:
    """400: the engine can never hold the prompt and its answer."""
    return ApiError(400, f"{error}. {CONTEXT_EXCEEDED}", code="context_length_exceeded")


def too_late(message: str) -> ApiError:
    """408: the request was not completed in time."""
    return ApiError(408, message, kind="timeout_error", code="deadline_exceeded")


def unexpected() -> ApiError:
    """500, for unexpected errors."""
    return ApiError(500, "internal error; the log of the server has the cause", kind="server_error")


def check_text(text: str, *, param: str) -> None:
    """Raises ApiError 400 for a lone surrogate, which JSON can express but UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        message = f"{param}: {surrogate} at {error.start} is a lone surrogate, which is not valid text; remove it"
        raise ApiError(400, message, param=param) from error


def install_error_handlers(app: FastAPI) -> None:
    """Gives every error of ``app`` an OpenAI error body; validation errors are 400 instead of FastAPI's 422."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(PydanticSerializationError, _not_repeatable)


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response()


async def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _from_validation(error.errors()).response()


async def _not_repeatable(_: Request, error: Exception) -> JSONResponse:
    """For fields that a response repeats without validating them before, such as ``metadata``."""
    if "surrogates" in str(error):
        return ApiError(400, "the body has a lone surrogate, which is not valid text; remove it").response()
    return ApiError(400, "the body is nested too deeply to be repeated in a response; flatten it").response()


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    kind = "timeout_error" if error.status_code == 408 else "invalid_request_error"
    response = ApiError(error.status_code, message, kind=kind, code=_CODES.get(error.status_code)).response()
    response.headers.update(error.headers or {})
    return response


def _from_validation(errors: Sequence[Any]) -> ApiError:
    """The deepest of pydantic's errors: unions report one for every alternative."""
    nothing: Mapping[str, Any] = {"loc": (), "msg": "invalid body"}
    first: Mapping[str, Any] = max(errors, key=lambda error: len(_path(error["loc"])), default=nothing)
    if first.get("type") == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}", code="invalid_json"
        )
    path = _path(first["loc"])
    text = str(first["msg"]).removeprefix("Value error, ")
    if not path and not isinstance(first.get("input"), dict):
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if not path:
        return ApiError(400, text, param=_leading_field(text))
    shown = "" if first.get("type") == "missing" else f" (got {_shorten(first.get('input'))})"
    return ApiError(400, f"{'.'.join(path)}: {text}{shown}", param=".".join(path))


def _leading_field(text: str) -> str | None:
    """The field name at the start of an error about the whole body."""
    word = text.split(" ", 1)[0]
    return word if "_" in word or word in ("logprobs", "tools") else None


def _path(location: Sequence[str | int]) -> list[str]:
    """Names and positions inside the body, without pydantic's marks for the alternatives of a union."""
    return [str(part) for part in location if part != "body" and (isinstance(part, int) or _is_field(part))]


def _is_field(part: str) -> bool:
    return part.isidentifier() and part not in ("str", "int", "float") and not part[0].isupper()


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN_VALUE else f"{text[:LONGEST_SHOWN_VALUE]}..."
