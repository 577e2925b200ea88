"""Sequences in the order of their service."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from megatron_runtime.engine.scheduling.sequence import Sequence

_ORDER = attrgetter("order")


class OrderedSequences:
    """A set of sequences, the most urgent first: by priority, then by tag, then by arrival.

    A new sequence is mostly the least urgent one, and is appended at no cost.
    """

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._by_id.get(sequence.request_id) is sequence

    @property
    def ids(self) -> list[int]:
        """Request ids, the most urgent first."""
        return [sequence.request_id for sequence in self._ordered]

    @property
    def first(self) -> Sequence:
        """The most urgent; there must be one."""
        return self._ordered[0]

    @property
    def last(self) -> Sequence:
        """The least urgent; there must be one."""
        return self._ordered[-1]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        self._by_id[sequence.request_id] = sequence
        insort(self._ordered, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; it must be in the set."""
        del self._by_id[sequence.request_id]
        del self._ordered[bisect_left(self._ordered, sequence.order, key=_ORDER)]
