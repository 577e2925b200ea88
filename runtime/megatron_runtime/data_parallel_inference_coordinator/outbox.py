"""Collects the messages of one loop iteration, so that many items for one peer share one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_runtime.headers import Headers
from megatron_runtime.wire.batches import BodyFrames
from megatron_runtime.wire.codec import MAX_BATCH, encode

DEFERRED_BATCH = 64
"""Number of deferred items that are sent without waiting for `release`."""


class Outbox:
    """Keeps the order per peer; consecutive items with the same header become one message."""

    def __init__(self) -> None:
        self._pending: dict[bytes, list[_Pending]] = {}
        self._deferred: dict[tuple[bytes, Headers], dict[Any, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def put(self, peer: bytes, header: Headers, *args: Any) -> None:
        """Add a message that is not a batch."""
        self._pending.setdefault(peer, []).append(_Pending(header, args, None))

    def add(self, peer: bytes, header: Headers, item: Any, body: bytes | None = None, *, shares: bool = False) -> int:
        """Add one item of a batch message; ``shares`` as for BodyFrames. Returns the size of its body frame."""
        messages = self._pending.setdefault(peer, [])
        last = messages[-1] if messages else None
        if last is None or last.header != header or last.is_full_for(body, shares=shares):
            last = _Pending(header, (), [])
            messages.append(last)
        assert last.items is not None
        last.items.append(item)
        return 0 if body is None else last.bodies.add(body, shares=shares)

    def defer(self, peer: bytes, header: Headers, item: Any) -> None:
        """Add one item without a body that is not urgent: it is sent with others, or after the next `release`."""
        items = self._deferred.setdefault((peer, header), {})
        items[item] = None
        if len(items) >= DEFERRED_BATCH:
            self._move(peer, header)

    def withdraw(self, peer: bytes, header: Headers, item: Any) -> None:
        """Do not send a deferred item."""
        self._deferred.get((peer, header), {}).pop(item, None)

    def release(self) -> None:
        """Send the deferred items."""
        for peer, header in list(self._deferred):
            self._move(peer, header)

    def _move(self, peer: bytes, header: Headers) -> None:
        for item in self._deferred.pop((peer, header)):
            self.add(peer, header, item)

    def drain(self, failed: Callable[[Exception], None]) -> Iterator[tuple[bytes, list[bytes]]]:
        """Empties the outbox: (peer, frames) in order. Messages added meanwhile stay for the next call.

        ``failed`` is called with the error of an item that can't be encoded; the others of its message are sent.
        """
        pending, self._pending = self._pending, {}
        for peer, messages in pending.items():
            for message in messages:
                for frames in _encoded(message, failed):
                    yield peer, frames

    def discard(self, peer: bytes) -> None:
        """Drop the messages for a lost peer."""
        self._pending.pop(peer, None)
        self._deferred = {key: items for key, items in self._deferred.items() if key[0] != peer}


class _Pending:
    __slots__ = ("args", "bodies", "header", "items")

    def __init__(self, header: Headers, args: tuple[Any, ...], items: list[Any] | None) -> None:
        self.header = header
        self.args = args
        self.items = items
        self.bodies = BodyFrames()

    def is_full_for(self, body: bytes | None, *, shares: bool) -> bool:
        """Whether an item with this body belongs into the next message."""
        return self.items is None or len(self.items) >= MAX_BATCH or self.bodies.is_full_for(body or b"", shares=shares)

    def singles(self) -> list[_Pending]:
        """A message per item, if there are several and each has a body or none has; else nothing."""
        items = self.items or []
        bodies: Sequence[bytes | None] = self.bodies.bodies or [None] * len(items)
        if len(items) < 2 or len(bodies) != len(items):
            return []
        return [self._single(item, body) for item, body in zip(items, bodies, strict=True)]

    def _single(self, item: Any, body: bytes | None) -> _Pending:
        single = _Pending(self.header, (), [item])
        if body is not None:
            single.bodies.add(body)
        return single

    def frames(self) -> list[bytes]:
        args = self.args if self.items is None else (self.items,)
        return encode(self.header, *args, bodies=self.bodies.frames)


def _encoded(message: _Pending, failed: Callable[[Exception], None]) -> list[list[bytes]]:
    try:
        return [message.frames()]
    except Exception as failure:
        # A defect must cost one item, not the service.
        singles = message.singles()
        if not singles:
            failed(failure)
        return [frames for single in singles for frames in _encoded(single, failed)]
