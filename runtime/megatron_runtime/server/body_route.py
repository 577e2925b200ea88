"""Routes with a JSON body: FastAPI describes them, but its dependency resolution is bypassed to save time."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from email.message import Message
from functools import lru_cache
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from megatron_runtime.server.errors import ApiError

MAX_COPIED_BYTES = 64 * 2**20
"""``n`` times the size of the body."""


class BodyRoute(APIRoute):
    """Serves an endpoint ``(body, request) -> Response``; ``body`` is a pydantic model.

    Its dependencies are coroutine functions of the request. They are called before the body is read.
    """

    @staticmethod
    def convert(content: Any) -> Any:
        """The parsed body as it is validated; subclasses change it."""
        return content

    def __init__(self, path: str, endpoint: Callable[[Any, Request], Awaitable[Response]], **described: Any) -> None:
        super().__init__(path, endpoint, **described)
        self._checked: Callable[[Any], Any] = TypeAdapter(get_type_hints(endpoint)["body"]).validate_python
        # FastAPI's own app resolves the endpoint's parameters again for every request.
        self.app = self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        for check in self.dependencies:
            assert check.dependency is not None
            await check.dependency(request)
        content = await _content(request)
        try:
            body = self._checked(self.convert(content))
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False)) from error
        _check_copies(getattr(body, "n", 1), len(await request.body()))
        answer: Response = await self.endpoint(body, request)
        return answer


def converting_route(convert: Callable[[Any], Any]) -> type[BodyRoute]:
    """A BodyRoute that converts the parsed body before it is validated."""
    return type("ConvertingRoute", (BodyRoute,), {"convert": staticmethod(convert)})


def _check_copies(n: int, size: int) -> None:
    """Each of ``n`` choices is a request to the engines with fields of the body."""
    if n * size > MAX_COPIED_BYTES:
        message = f"n: {n} choices of a body of {size} bytes exceed {MAX_COPIED_BYTES} bytes; reduce n or the body"
        raise ApiError(400, message, param="n")


async def _content(request: Request) -> Any:
    """The parsed body; its bytes if the content type is not JSON. Errors are those of FastAPI."""
    try:
        raw = await request.body()
        return json.loads(raw) if raw and _is_json(request.headers.get("content-type", "")) else raw
    except json.JSONDecodeError as error:
        error_item = {"type": "json_invalid", "loc": (error.pos,), "msg": "", "ctx": {"error": error.msg}}
        raise RequestValidationError([error_item]) from error
    except HTTPException:
        raise
    except Exception as error:
        raise HTTPException(400, "There was an error parsing the body") from error


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    header = Message()
    header["content-type"] = content_type
    kind, subtype = header.get_content_maintype(), header.get_content_subtype()
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
