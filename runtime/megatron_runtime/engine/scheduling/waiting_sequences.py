"""The queue: sequences in the order of their admission."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from megatron_runtime.engine.scheduling.ordered_sequences import OrderedSequences
from megatron_runtime.engine.scheduling.running_sequences import RunningSequences
from megatron_runtime.engine.scheduling.sequence import Sequence


class WaitingSequences:
    """A set of sequences. The first is one of the highest priority; of these, of the tenant with the fewest running
    sequences; and of these, the first in order.

    Args:
        running: The running sequences.
    """

    def __init__(self, running: RunningSequences) -> None:
        self._running = running
        self._by_tenant: dict[str, OrderedSequences] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._by_tenant.values())

    def __contains__(self, sequence: Sequence) -> bool:
        queue = self._by_tenant.get(sequence.tenant)
        return queue is not None and sequence in queue

    @property
    def first(self) -> Sequence:
        """The sequence to admit next; there must be one."""
        if len(self._by_tenant) == 1:
            return next(iter(self._by_tenant.values())).first
        heads = (queue.first for queue in self._by_tenant.values())
        return min(heads, key=lambda head: (head.priority, self._running.count(head.tenant), head.order))

    def add(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._by_tenant.setdefault(sequence.tenant, OrderedSequences()).add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; it must be in the set."""
        queue = self._by_tenant[sequence.tenant]
        queue.remove(sequence)
        if not queue:
            del self._by_tenant[sequence.tenant]
