"""Requests that a client may send again: the header ``Idempotency-Key`` names them.

What a client sees of a frontend that dies is a connection that breaks, and OpenAI's own client then sends the request
again. With a key the repetition is the same request: it goes on with what runs for it already, or is answered from what
became of that; and where it has to run anew it has the same seed, so that the answer is the same.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass

from fastapi import Request
from pydantic_core import PydanticSerializationError

from megatron_runtime.server.bodies.protocol import GenerationBody
from megatron_runtime.server.errors import ApiError

HEADER = "idempotency-key"
LONGEST_KEY = 255
_SEED_BYTES = 8


@dataclass(frozen=True)
class RequestName:
    """Names the choices of one request, alike whenever the same client sends it again."""

    digest: str

    def uuid(self, choice: int) -> bytes:
        """The name of a choice towards the coordinator, which keeps such requests for a client that comes back."""
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{self.digest}/{choice}").bytes

    def seed(self, choice: int) -> int:
        """The seed of a choice that was given none."""
        return int.from_bytes(hashlib.sha256(f"{self.digest}/seed/{choice}".encode()).digest()[:_SEED_BYTES])


def request_name(request: Request, body: GenerationBody) -> RequestName | None:
    """The name that the request's header gives it, together with its body and its API key; None without the header.

    Raises:
        ApiError: 400, when the header is empty or too long, or the body nested too deeply.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return None
    if not 0 < len(key) <= LONGEST_KEY:
        raise ApiError(400, f"Idempotency-Key: {len(key)} characters; use 1 to {LONGEST_KEY}", param="Idempotency-Key")
    try:
        content = body.model_dump_json()
    except PydanticSerializationError as error:
        raise ApiError(400, f"the body can't be told from others: {error}") from error
    credentials = [request.headers.get(header) for header in ("authorization", "x-api-key")]
    parts = [key, credentials, request.url.path, content]
    return RequestName(hashlib.sha256(json.dumps(parts).encode()).hexdigest())


def already_running() -> ApiError:
    """409: this frontend is about to answer the same request over another connection, which may be dead."""
    message = "Idempotency-Key: the same request is being answered already; try again when it has ended"
    return ApiError(409, message, kind="conflict_error", code="idempotency_conflict", retry_after=1)
