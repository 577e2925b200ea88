"""The running sequences, and which of them make room for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_runtime.engine.scheduling.ordered_sequences import OrderedSequences
from megatron_runtime.engine.scheduling.sequence import Sequence

_EXCESS = 2
"""A tenant with so many running sequences more than another one has no fewer than that after it has made room."""
_LARGER = 1
"""A body makes room only for those with a tag that is smaller by more than this: none of two similar ones does."""


class RunningSequences(OrderedSequences):
    """The running sequences in the order of their service."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def count(self, tenant: str) -> int:
        """Number of running sequences of a tenant."""
        return self._counts[tenant]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        super().add(sequence)
        self._counts[sequence.tenant] += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; it must be in the set."""
        super().remove(sequence)
        self._counts[sequence.tenant] -= 1
        if not self._counts[sequence.tenant]:
            del self._counts[sequence.tenant]

    @property
    def to_evict(self) -> Sequence:
        """The sequence to evict when memory is exhausted: one of the lowest priority; of these, of the tenant with the
        most running sequences; and of these, the last in order. It is the first of all only if it is alone."""
        if len(self._counts) == 1:
            return self.last
        return max(self, key=lambda each: (each.priority, self._counts[each.tenant], each.order))

    def has_excess(self, head: Sequence) -> bool:
        """Whether `excess` has any sequence for ``head``."""
        return next(self.excess(head), None) is not None

    def excess(self, head: Sequence) -> Iterator[Sequence]:
        """The sequences that may be evicted for ``head``, which waits, in this order.

        They are the last ones of the tenant with the most running sequences, as long as it has at least as many as the
        tenant of ``head`` once both are done; or else those of that tenant itself whose bodies have larger tags. None
        has a higher priority. So a sequence that is evicted is in the queue behind ``head``, and does not evict it in
        turn; and no tenant is evicted below an equal share.
        """
        if not self._may_have_excess(head):
            return
        candidates: dict[str, list[Sequence]] = {}
        for each in self:
            if each.priority >= head.priority:
                candidates.setdefault(each.tenant, []).append(each)
        own = sorted(candidates.pop(head.tenant, ()), key=lambda each: (each.tag, each.priority, each.arrival))
        counts = self._counts.copy()
        while True:
            other = max(candidates, key=lambda tenant: (counts[tenant], candidates[tenant][-1].order), default="")
            if candidates and counts[other] >= counts[head.tenant] + _EXCESS:
                yield candidates[other].pop()
                counts[other] -= 1
                if not candidates[other]:
                    del candidates[other]
            elif own and own[-1].tag > head.tag + _LARGER:
                yield own.pop()
                counts[head.tenant] -= 1
            else:
                return

    def _may_have_excess(self, head: Sequence) -> bool:
        """False if there is certainly none: in nearly every pass of a uniform load, and fast."""
        most = self._counts[head.tenant] + _EXCESS
        if any(count >= most for count in self._counts.values()):
            return True
        largest = head.tag + _LARGER
        return any(each.tag > largest for each in self)
