"""Limits of an activator: the requests and bytes that it holds at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one activator, for all models together. Times are in seconds."""

    requests: int = 1000
    """Requests that wait for a model."""
    body_bytes: int = 256 << 20
    """Bytes of the bodies of requests whose answers have not begun."""
    wait: float = 900.0
    """Time that a request waits for a model."""
    keep_alive: float = 10.0
    """Time between comments in the event stream of a request that waits."""


class LimitExceeded(Exception):
    """The activator holds as much as it may. ``str()`` is the message for the client."""


class Usage:
    """What an activator holds now."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.body_bytes = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request that waits. Raises LimitExceeded."""
        if self.requests >= self._limits.requests:
            raise LimitExceeded(f"{self.requests} requests wait for models already, the most that this activator holds")
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    def add_bytes(self, count: int) -> None:
        """Count bytes of a body, until ``remove_bytes``. Raises LimitExceeded."""
        if self.body_bytes + count > self._limits.body_bytes:
            raise LimitExceeded(f"bodies of requests exceed the {self._limits.body_bytes} bytes of this activator")
        self.body_bytes += count

    def remove_bytes(self, count: int) -> None:
        """The bytes are no longer held."""
        self.body_bytes -= count
