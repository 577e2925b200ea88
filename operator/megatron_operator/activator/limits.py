"""Limits of an activator: the requests and bytes that it holds at a time."""

from __future__ import annotations

import http
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_operator.activator.refusal import Refusal, unavailable


@dataclass(frozen=True)
class Limits:
    """Limits of one activator, for all models together. Times are in seconds."""

    requests: int = 1000
    """Requests that wait for a model."""
    body_bytes: int = 16 << 20
    """Bytes of one body; the default is that of the models' servers."""
    total_body_bytes: int = 256 << 20
    """Bytes of the bodies of all requests whose answers have not begun."""
    connections: int = 4096
    """Connections of clients; half of the files that the process may open, if that is less."""
    address_share: float = 0.5
    """Part of ``connections`` and of ``total_body_bytes`` that the clients of one IP address may have."""
    wait: float = 900.0
    """Time that a request waits for a model."""
    keep_alive: float = 10.0
    """Time between comments in the event stream of a request that waits."""
    head_timeout: float = 10.0
    """Time in which the head of a request must arrive, from the begin of the connection or from its first byte."""
    body_timeout: float = 60.0
    """Time in which a body must arrive; the default is that of the models' servers."""

    def share_of(self, limit: int) -> int:
        """The part of a limit that one address may have, at least 1."""
        return max(1, int(limit * self.address_share))


class Usage:
    """What an activator holds now."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.body_bytes = 0
        self.addresses: dict[str, int] = {}
        """``body_bytes`` by the client's IP address."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request that waits. Raises Refusal 503."""
        if self.requests >= self._limits.requests:
            raise unavailable(f"{self.requests} requests wait for models already, the most that this activator holds")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def body(self, address: str) -> HeldBody:
        """A body from this IP address, of which no bytes are held yet."""
        return HeldBody(self, self._limits, address)

    def add(self, address: str, count: int) -> None:
        """Count bytes of a body from this address. Raises Refusal 503."""
        total, own = self._limits.total_body_bytes, self._limits.share_of(self._limits.total_body_bytes)
        if self.body_bytes + count > total:
            raise unavailable(f"the bodies of requests exceed the {total} bytes that this activator holds")
        if (held := self.addresses.get(address, 0) + count) > own:
            words = (
                f"the bodies of requests from {address} exceed the {own} bytes that this activator holds for an address"
            )
            raise unavailable(words)
        self.body_bytes += count
        self.addresses[address] = held

    def remove(self, address: str, count: int) -> None:
        """Bytes that were added are no longer held."""
        self.body_bytes -= count
        self.addresses[address] = self.addresses.get(address, 0) - count
        if not self.addresses[address]:
            del self.addresses[address]


class HeldBody:
    """The bytes of one body. ``release`` frees them; it may be called repeatedly."""

    def __init__(self, usage: Usage, limits: Limits, address: str) -> None:
        self._usage = usage
        self._limits = limits
        self._address = address
        self._parts = bytearray()
        self.longest: int | None = None
        """Bytes that this body may have without a valid API key; None: those of the limits."""

    @property
    def content(self) -> bytearray:
        """The bytes that were added; none after the release."""
        return self._parts

    def check(self, length: int) -> None:
        """Raises Refusal 413 or 401 for a body of this length, announced or received."""
        if length > self._limits.body_bytes:
            words = f"the body is larger than the {self._limits.body_bytes} bytes that this activator accepts"
            raise Refusal(words, http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, code="body_too_large")
        if self.longest is not None and length > self.longest:
            words = f"no valid API key: a body of more than {self.longest} bytes needs a key of the model"
            raise Refusal(words, http.HTTPStatus.UNAUTHORIZED, code="invalid_api_key")

    def add(self, part: bytes) -> None:
        """Add bytes that were received. Raises Refusal as ``check``, and 503."""
        self.check(len(self._parts) + len(part))
        self._usage.add(self._address, len(part))
        self._parts += part

    def release(self) -> None:
        """Drop the bytes."""
        self._usage.remove(self._address, len(self._parts))
        self._parts = bytearray()
