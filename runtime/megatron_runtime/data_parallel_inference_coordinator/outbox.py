"""Messages that wait for the end of the turn, so that many items to one peer share one message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_runtime.headers import Headers
from megatron_runtime.wire.codec import MAX_BATCH, encode

ENOUGH_FOR_A_MESSAGE = 64


class Outbox:
    """Order per peer is kept; items of the same type that follow each other become one message."""

    def __init__(self) -> None:
        self._pending: dict[bytes, list[_Pending]] = {}
        self._later: dict[tuple[bytes, Headers], list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def put(self, peer: bytes, header: Headers, *args: Any) -> None:
        """A message that stands alone."""
        self._pending.setdefault(peer, []).append(_Pending(header, args, None, []))

    def add(self, peer: bytes, header: Headers, item: Any, body: bytes | None = None) -> None:
        """One item of a batch message."""
        messages = self._pending.setdefault(peer, [])
        last = messages[-1] if messages else None
        if last is None or last.header != header or last.items is None or len(last.items) >= MAX_BATCH:
            last = _Pending(header, (), [], [])
            messages.append(last)
        assert last.items is not None
        last.items.append(item)
        if body is not None:
            last.bodies.append(body)

    def add_later(self, peer: bytes, header: Headers, item: Any) -> None:
        """One item without a body that nobody waits for: it leaves with enough others, or with the next release."""
        items = self._later.setdefault((peer, header), [])
        items.append(item)
        if len(items) >= ENOUGH_FOR_A_MESSAGE:
            self._move(peer, header)

    def release(self) -> None:
        """What was added for later leaves now."""
        for peer, header in list(self._later):
            self._move(peer, header)

    def _move(self, peer: bytes, header: Headers) -> None:
        for item in self._later.pop((peer, header)):
            self.add(peer, header, item)

    def take(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Empties the box: (peer, frames) in the order of sending. What is added meanwhile waits for the next take."""
        pending, self._pending = self._pending, {}
        for peer, messages in pending.items():
            for message in messages:
                yield peer, message.frames()

    def forget(self, peer: bytes) -> None:
        """Drop what waits for a peer that is gone."""
        self._pending.pop(peer, None)
        self._later = {key: items for key, items in self._later.items() if key[0] != peer}


class _Pending:
    __slots__ = ("args", "bodies", "header", "items")

    def __init__(self, header: Headers, args: tuple[Any, ...], items: list[Any] | None, bodies: list[bytes]) -> None:
        self.header = header
        self.args = args
        self.items = items
        self.bodies = bodies

    def frames(self) -> list[bytes]:
        args = self.args if self.items is None else (self.items,)
        return encode(self.header, *args, bodies=self.bodies)
