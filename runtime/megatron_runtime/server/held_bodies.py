"""The limits on the bytes of request bodies: of one, and of all that a process holds."""

from __future__ import annotations

import http
from collections import Counter

from starlette.exceptions import HTTPException

from megatron_runtime.server.large_bodies import LARGE_BODY_BYTES

RETRY_SECONDS = 5
CLOSE = {"Connection": "close"}
"""Close the connection instead of reading the rest of such a body to find the next request."""


class HeldBodies:
    """Counts the bodies of the requests in progress. Half of the bytes may come from one address.

    Small bodies are counted and never refused: large ones of other clients do not keep them out, and the limit on
    connections bounds them.

    Args:
        limit: Bytes of all bodies together.
        largest: Bytes of one body, which an address may hold in any case.
    """

    def __init__(self, limit: int, largest: int) -> None:
        self.limit = limit
        self.share = max(limit // 2, largest)
        self.total = 0
        self.by_address: Counter[str] = Counter()

    def body(self, address: str) -> ReceivedBody:
        """A body from this address of which nothing has arrived yet."""
        return ReceivedBody(self, address)


class ReceivedBody:
    """The bytes of one body that have arrived."""

    def __init__(self, held: HeldBodies, address: str) -> None:
        self._held = held
        self._address = address
        self.size = 0

    def add(self, count: int) -> None:
        """Count bytes that have arrived. HTTPException: 429 if the address holds too many, 503 if all do."""
        held = self._held
        self.size += count
        held.total += count
        held.by_address[self._address] += count
        if self.size <= LARGE_BODY_BYTES:
            return
        if held.by_address[self._address] > held.share:
            words = f"the bodies of your requests in progress have more than {held.share} bytes"
            raise _refused(http.HTTPStatus.TOO_MANY_REQUESTS, words)
        if held.total > held.limit:
            words = f"the bodies of all requests in progress have more than {held.limit} bytes"
            raise _refused(http.HTTPStatus.SERVICE_UNAVAILABLE, words)

    def release(self) -> None:
        """The request has ended."""
        held = self._held
        held.total -= self.size
        held.by_address[self._address] -= self.size
        if not held.by_address[self._address]:
            del held.by_address[self._address]
        self.size = 0


def check_size(size: int, limit: int) -> None:
    """Raises HTTPException 413 for a body of more than ``limit`` bytes."""
    if size > limit:
        raise HTTPException(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {limit} bytes", CLOSE)


def _refused(status: http.HTTPStatus, words: str) -> HTTPException:
    return HTTPException(status, f"{words}; send this one again later", {**CLOSE, "Retry-After": str(RETRY_SECONDS)})
