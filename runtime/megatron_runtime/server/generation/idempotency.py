"""Idempotent requests: the header ``Idempotency-Key`` identifies a request that a client may send again.

When a frontend fails, its clients see a broken connection, and OpenAI's client retries the request. With a key the
retry is the same request: it joins the running request or returns its result. If it has to run again, it has the same
seed and so the same answer.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass

from fastapi import Request
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from megatron_runtime.server.errors import ApiError

HEADER = "idempotency-key"
LONGEST_KEY = 255
_SEED_BYTES = 8


@dataclass(frozen=True)
class IdempotencyKey:
    """Identifies the choices of one request; equal for every retry by the same client."""

    digest: str

    def uuid(self, choice: int) -> bytes:
        """The UUID of a choice; the coordinator keeps such requests for a client that reconnects."""
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{self.digest}/{choice}").bytes

    def seed(self, choice: int) -> int:
        """The seed of a choice without a seed of its own."""
        return int.from_bytes(hashlib.sha256(f"{self.digest}/seed/{choice}".encode()).digest()[:_SEED_BYTES])


def idempotency_key(request: Request, body: BaseModel) -> IdempotencyKey | None:
    """The key made of the request's header, body and API key; None without the header.

    Raises:
        ApiError: 400, when the header is empty or too long, or the body nested too deeply.
    """
    header = request.headers.get(HEADER)
    if header is None:
        return None
    if not 0 < len(header) <= LONGEST_KEY:
        raise ApiError(
            400, f"Idempotency-Key: {len(header)} characters; use 1 to {LONGEST_KEY}", param="Idempotency-Key"
        )
    try:
        content = body.model_dump_json()
    except PydanticSerializationError as error:
        raise ApiError(
            400, f"Idempotency-Key: the body can't be serialized to identify the request: {error}"
        ) from error
    credentials = [request.headers.get(name) for name in ("authorization", "x-api-key")]
    parts = [header, credentials, request.url.path, content]
    return IdempotencyKey(hashlib.sha256(json.dumps(parts).encode()).hexdigest())


def already_running() -> ApiError:
    """409: this frontend processes the same request on another connection, which may be broken."""
    message = "Idempotency-Key: the same request is already in progress; retry when it has ended"
    return ApiError(409, message, kind="conflict_error", code="idempotency_conflict", retry_after=1)
