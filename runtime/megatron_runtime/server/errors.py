"""Errors of the HTTP frontend, in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException

LONGEST_SHOWN_VALUE = 80

CONTEXT_EXCEEDED = "This model's maximum context length was exceeded."
"""In the message of an error because of a prompt that is too long: clients of Megatron's server search for it."""


def context_length(longest: int) -> str:
    """The limit in the words of OpenAI's API, by which clients such as LiteLLM recognize the error."""
    return f"This model's maximum context length is {longest} tokens, for prompt and answer together."


_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
    429: "bodies_too_large",
    503: "bodies_too_large",
}
_KINDS = {408: "timeout_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


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


class ErrorResponse(Protocol):
    """Makes the response to a request that failed."""

    def __call__(self, request: Request, error: ApiError) -> JSONResponse:
        """The complete HTTP response."""
        ...


def install_error_handlers(app: FastAPI, formats: Mapping[str, ErrorResponse]) -> None:
    """Gives every error of ``app`` an OpenAI error body; validation errors are 400 instead of FastAPI's 422.

    Paths that begin with a key of ``formats`` get errors in its format.
    """
    for kind, convert in _CONVERTERS.items():
        app.add_exception_handler(kind, partial(_respond, convert, formats))


def formatted_error(formats: Mapping[str, ErrorResponse], request: Request, error: ApiError) -> JSONResponse:
    """The response to a request that failed, in the format of ``formats`` for its path or else in OpenAI's."""
    path = request.url.path
    form = next((form for prefix, form in formats.items() if path.startswith(prefix)), None)
    return error.response() if form is None else form(request, error)


async def _respond(
    convert: Callable[[Request, Any], ApiError],
    formats: Mapping[str, ErrorResponse],
    request: Request,
    error: Exception,
) -> JSONResponse:
    response = formatted_error(formats, request, convert(request, error))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _not_repeatable(_: Request, error: PydanticSerializationError) -> ApiError:
    """For fields that a response repeats without validating them before, such as ``metadata``."""
    if "surrogates" in str(error):
        return ApiError(400, "the body has a lone surrogate, which is not valid text; remove it")
    return ApiError(400, "the body is nested too deeply to be repeated in a response; flatten it")


def _http_error(request: Request, error: HTTPException) -> ApiError:
    message = f"{request.method} {request.url.path}: {error.detail}"
    kind = _KINDS.get(error.status_code, "invalid_request_error")
    return ApiError(error.status_code, message, kind=kind, code=_CODES.get(error.status_code))


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


_CONVERTERS: dict[type[Exception], Callable[[Request, Any], ApiError]] = {
    ApiError: lambda _, error: error,
    RequestValidationError: lambda _, error: _from_validation(error.errors()),
    HTTPException: _http_error,
    PydanticSerializationError: _not_repeatable,
}
