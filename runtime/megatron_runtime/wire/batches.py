"""Splits items with bodies into messages of bounded size, between which other messages can be sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from megatron_runtime.wire.codec import MAX_BATCH

_Item = TypeVar("_Item", bound=tuple[Any, ...])

BATCH_BYTES = 2**20
"""A message with more bytes gets no further item: messages behind it, such as heartbeats, wait only for so many."""
NUMBER_BYTES = 9
"""Most bytes of a number in a message."""


def in_batches(pairs: Iterable[tuple[_Item, bytes]]) -> Iterator[tuple[list[_Item], list[bytes]]]:
    """The items and their bodies, in order, for one message each time."""
    batch: list[_Item] = []
    bodies: list[bytes] = []
    size = 0
    for item, body in pairs:
        batch.append(item)
        bodies.append(body)
        size += len(body) + sum(len(field) * NUMBER_BYTES for field in item if isinstance(field, list))
        if len(batch) >= MAX_BATCH or size >= BATCH_BYTES:
            yield batch, bodies
            batch, bodies, size = [], [], 0
    if batch:
        yield batch, bodies
