"""Sequences in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from megatron_runtime.engine.scheduling.sequence import Sequence

_TURN = attrgetter("turn")


class OrderedSequences:
    """A set of sequences, the most urgent first: by priority, then by arrival.

    Who arrives last is mostly the least urgent, and joins at the end at no cost.
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
        """Put a sequence where its turn is."""
        self._by_id[sequence.request_id] = sequence
        insort(self._ordered, sequence, key=_TURN)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be one of these."""
        del self._by_id[sequence.request_id]
        del self._ordered[bisect_left(self._ordered, sequence.turn, key=_TURN)]
