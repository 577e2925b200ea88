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
    wait: float = 900.0
    """Time that a request waits for a model."""
    keep_alive: float = 10.0
    """Time between comments in the event stream of a request that waits."""


class Usage:
    """What an activator holds now."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.body_bytes = 0

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

    def body(self) -> HeldBody:
        """A body of which no bytes are held yet."""
        return HeldBody(self, self._limits)


class HeldBody:
    """The bytes of one body. ``release`` frees them; it may be called repeatedly."""

    def __init__(self, usage: Usage, limits: Limits) -> None:
        self._usage = usage
        self._limits = limits
        self._counted = 0
        self._parts = bytearray()

    @property
    def content(self) -> bytearray:
        """The bytes that were added; none after the release."""
        return self._parts

    def announce(self, length: int) -> None:
        """Count bytes that will be added. Raises Refusal 413 and 503."""
        if length > self._limits.body_bytes:
            words = f"the body is larger than the {self._limits.body_bytes} bytes that this activator accepts"
            raise Refusal(words, http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, code="body_too_large")
        if (more := length - self._counted) > 0:
            if self._usage.body_bytes + more > self._limits.total_body_bytes:
                limit = self._limits.total_body_bytes
                raise unavailable(f"the bodies of requests exceed the {limit} bytes that this activator holds")
            self._usage.body_bytes += more
            self._counted = length

    def add(self, part: bytes) -> None:
        """Add bytes that were received. Raises Refusal 413 and 503."""
        self.announce(len(self._parts) + len(part))
        self._parts += part

    def release(self) -> None:
        """Drop the bytes."""
        self._usage.body_bytes -= self._counted
        self._counted = 0
        self._parts = bytearray()
