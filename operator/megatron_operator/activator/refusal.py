"""Requests that an activator refuses, in the format of OpenAI's API."""

from __future__ import annotations

import http
from typing import Any


class Refusal(Exception):
    """The request is refused. ``str()`` is the message for the client.

    Args:
        message: It names the field or the model, and a fix.
        status: That of the HTTP answer.
        code: The error's code for programs; the status without one.
        param: The field of the body that is wrong.
    """

    def __init__(self, message: str, status: int, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body; also the last event of a stream that has begun."""
        kind = "server_error" if self.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        message, code = str(self), self.status if self.code is None else self.code
        return {"error": {"message": message, "type": kind, "param": self.param, "code": code}}


def unavailable(message: str) -> Refusal:
    """503: the same request may succeed later."""
    return Refusal(message, http.HTTPStatus.SERVICE_UNAVAILABLE)
