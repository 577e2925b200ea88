"""Routes with a JSON body: FastAPI describes them, but its dependency resolution is bypassed to save time."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from email.message import Message
from functools import lru_cache
from typing import Any, ClassVar, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.held_bodies import check_size
from megatron_runtime.server.known_fields import KnownFields
from megatron_runtime.server.large_bodies import LargeBodies

MAX_COPIED_BYTES = 64 * 2**20
"""``n`` times the size of the body."""
MAX_VALUES = 2**20
"""Of lists and objects in a body: so many take a tenth of a second, in which the thread that parses and validates them
keeps the interpreter from all others.
"""
MAX_CONTAINERS = 2**15
"""Objects and lists in a body. ``{},`` takes 3 bytes of it and 72 of memory, so that many of them multiply its size."""
BYTES_PER_CONTAINER = 16
"""Larger bodies may have one for so many bytes; short messages with parts have one for 25."""
_PIECE = 2**16
"""Bytes whose objects and lists are counted at once."""
_CHECKED_FIRST_BYTES = 2**18
"""Of larger bodies only known fields are parsed, after a check of their limits."""


class BodyRoute(APIRoute):
    """Serves an endpoint ``(body, request) -> Response``; ``body`` is a pydantic model.

    Its dependencies are coroutine functions of the request. They are called before the body is read. FastAPI itself
    serves an endpoint without a body.
    """

    large_bodies: ClassVar[LargeBodies]
    max_bytes: ClassVar[int | None] = None
    """Largest body of the route, if that is less than the server's limit."""

    @staticmethod
    def convert(content: Any) -> Any:
        """The parsed body as it is validated; subclasses change it."""
        return content

    def __init__(self, path: str, endpoint: Callable[[Any, Request], Awaitable[Response]], **described: Any) -> None:
        super().__init__(path, endpoint, **described)
        if (body := get_type_hints(endpoint).get("body")) is not None:
            self._checked: Callable[[Any], Any] = TypeAdapter(body).validate_python
            self._fields = KnownFields(body)
            # FastAPI's own app resolves the endpoint's parameters again for every request.
            self.app = self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        for check in self.dependencies:
            assert check.dependency is not None
            await check.dependency(request)
        raw = await _received(request, self.max_bytes)
        is_json = _is_json(request.headers.get("content-type", ""))
        turn = await self.large_bodies.turn(len(raw) if self.max_bytes is None else 0)
        request.state.turn = turn
        try:
            body = await self.large_bodies.run(len(raw), self._parsed, raw, is_json=is_json)
            answer: Response = await self.endpoint(body, request)
        finally:
            turn.end()
        return answer

    def _parsed(self, raw: bytes, *, is_json: bool) -> Any:
        content = _content(raw, self._fields) if raw and is_json else raw
        try:
            body = self._checked(self.convert(content))
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False)) from error
        _check_copies(getattr(body, "n", 1), len(raw))
        return body


def body_route(
    large_bodies: LargeBodies, convert: Callable[[Any], Any] | None = None, *, max_bytes: int | None = None
) -> type[BodyRoute]:
    """A BodyRoute for APIRouter, which may convert the parsed body before it is validated."""
    changed = {} if convert is None else {"convert": staticmethod(convert)}
    return type("ConfiguredBodyRoute", (BodyRoute,), {"large_bodies": large_bodies, "max_bytes": max_bytes, **changed})


def end_turn(request: Request) -> None:
    """All work on the body is done, so it is the turn of the next large one. Endpoints call it before they wait."""
    request.state.turn.end()


def _check_copies(n: int, size: int) -> None:
    """Each of ``n`` choices is a request to the engines with fields of the body."""
    if n * size > MAX_COPIED_BYTES:
        message = f"n: {n} choices of a body of {size} bytes exceed {MAX_COPIED_BYTES} bytes; reduce n or the body"
        raise ApiError(400, message, param="n")


async def _received(request: Request, limit: int | None) -> bytes:
    """The body. Errors are those of FastAPI, and 413 for a body beyond ``limit``."""
    try:
        if limit is None:
            return await request.body()
        raw = b""
        async for piece in request.stream():
            raw += piece
            check_size(len(raw), limit)
        return raw
    except HTTPException:
        raise
    except Exception as error:
        raise HTTPException(400, "There was an error parsing the body") from error


def _content(raw: bytes, fields: KnownFields) -> Any:
    # Commas in texts count too, but more of them do not fit into a prompt either.
    if (commas := raw.count(b",")) > MAX_VALUES:
        message = f"the body has about {commas} values; send at most {MAX_VALUES} in one request"
        raise ApiError(400, message, param=None)
    if (containers := _containers(raw)) > (limit := max(MAX_CONTAINERS, len(raw) // BYTES_PER_CONTAINER)):
        message = f"the body has {containers} objects and lists in {len(raw)} bytes; send at most {limit}"
        raise ApiError(400, message, param=None)
    try:
        return json.loads(raw) if len(raw) <= _CHECKED_FIRST_BYTES else fields.parsed(raw)
    except json.JSONDecodeError as error:
        raise _invalid_json(error.msg, error.pos) from error
    except (ValueError, RecursionError) as error:
        raise _invalid_json(str(error), 0) from error


def _containers(raw: bytes) -> int:
    """The number of objects and lists, outside of texts if there are many."""
    if (count := raw.count(b"{") + raw.count(b"[")) <= MAX_CONTAINERS:
        return count
    import numpy as np  # rarely used, and a tenth of the time in which a frontend starts

    # Behind this, each quotation mark begins or ends a text.
    body = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    count, in_text = 0, np.False_
    for start in range(0, len(body), _PIECE):
        piece = body[start : start + _PIECE]
        texts = np.logical_xor.accumulate(piece == ord('"')) ^ in_text
        count += int(np.count_nonzero(((piece == ord("{")) | (piece == ord("["))) & ~texts))
        in_text = texts[-1]
    return count


def _invalid_json(message: str, position: int) -> RequestValidationError:
    return RequestValidationError([{"type": "json_invalid", "loc": (position,), "msg": "", "ctx": {"error": message}}])


@lru_cache(maxsize=64)
def _is_json(content_type: str) -> bool:
    header = Message()
    header["content-type"] = content_type
    kind, subtype = header.get_content_maintype(), header.get_content_subtype()
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
