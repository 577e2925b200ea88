"""Splits items with bodies into messages of bounded size, between which other messages can be sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from megatron_runtime.wire.codec import MAX_BATCH

_Item = TypeVar("_Item", bound=tuple[Any, ...])


class _Seeded(Protocol):
    @property
    def seed(self) -> int | None: ...


_SeededItem = TypeVar("_SeededItem", bound=_Seeded)

BATCH_BYTES = 2**20
"""A message with more bytes gets no further item: messages behind it, such as heartbeats, wait only for so many."""
NUMBER_BYTES = 9
"""Most bytes of a number in a message."""


def in_batches(
    pairs: Iterable[tuple[_Item, bytes]], *, shares: bool = False
) -> Iterator[tuple[list[_Item], list[bytes]]]:
    """The items and their bodies, in order, for one message each time; ``shares`` as for BodyFrames."""
    batch: list[_Item] = []
    frames = BodyFrames()
    size = 0
    for item, body in pairs:
        if len(batch) >= MAX_BATCH or size >= BATCH_BYTES or frames.is_full_for(body, shares=shares):
            yield batch, frames.frames
            batch, frames, size = [], BodyFrames(), 0
        batch.append(item)
        frames.add(body, shares=shares)
        size += sum(len(field) * NUMBER_BYTES for field in item if isinstance(field, list))
    if batch:
        yield batch, frames.frames


class BodyFrames:
    """The body frames of one message. A body that several items in a row share is sent once if they have seeds, which
    is what ``shares`` means: the others get an empty frame."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.bodies: list[bytes] = []
        self._size = 0
        self._last = b""

    def add(self, body: bytes, *, shares: bool = False) -> int:
        """Add the body of the next item. Returns the size of its frame."""
        frame = b"" if shares and body is self._last else body
        self._last = body or self._last
        self.frames.append(frame)
        self.bodies.append(body)
        self._size += len(frame)
        return len(frame)

    def is_full_for(self, body: bytes, *, shares: bool = False) -> bool:
        """Whether this body belongs into the next message."""
        return self._size >= BATCH_BYTES and not (shares and body is self._last)


def with_bodies(items: Sequence[_SeededItem], frames: Sequence[bytes]) -> Iterator[tuple[_SeededItem, bytes]]:
    """The items with their bodies: the inverse of BodyFrames for items with seeds."""
    last = b""
    for item, frame in zip(items, frames, strict=True):
        body = last if not frame and item.seed is not None else frame
        last = frame or last
        yield item, body
