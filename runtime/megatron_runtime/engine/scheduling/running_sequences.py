"""The running sequences, and which of them make room for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from megatron_runtime.engine.scheduling.ordered_sequences import OrderedSequences
from megatron_runtime.engine.scheduling.sequence import Sequence

_EXCESS = 2
"""A tenant with so many running sequences more than another one has no fewer than that after it has made room."""
ALIKE = 4
"""Bodies and tenants with up to so many times the answers of the smallest one do not wait for it."""
_LARGER = 1
"""A body makes room only for those with a tag that is smaller by more than this: none of two similar ones does."""


class RunningSequences(OrderedSequences):
    """The running sequences in the order of their service."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()
        self._sizes: dict[str, Counter[int]] = {}
        """By tenant, how many sequences belong to bodies of each number of answers."""

    def count(self, tenant: str) -> int:
        """Number of running sequences of a tenant."""
        return self._counts[tenant]

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        super().add(sequence)
        self._counts[sequence.tenant] += 1
        self._sizes.setdefault(sequence.tenant, Counter())[sequence.answers] += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; it must be in the set."""
        super().remove(sequence)
        tenant, sizes = sequence.tenant, self._sizes[sequence.tenant]
        self._counts[tenant] -= 1
        sizes[sequence.answers] -= 1
        if not sizes[sequence.answers]:
            del sizes[sequence.answers]
        if not sizes:
            del self._counts[tenant], self._sizes[tenant]

    @property
    def to_evict(self) -> Sequence:
        """The sequence to evict when memory is exhausted: one of the lowest priority; of these, of the tenant with the
        most running sequences; and of these, the last in order. It is the first of all only if it is alone."""
        if len(self._counts) == 1:
            return self.last
        return max(self, key=lambda each: (each.priority, self._counts[each.tenant], each.order))

    def are_alike(self, others: Iterable[Sequence]) -> bool:
        """Whether no tenant, and no body of a tenant, has more than ``ALIKE`` times the answers of another one, also
        with ``others``, which do not run. There must be a sequence."""
        counts, sizes = dict(self._counts), {tenant: set(each) for tenant, each in self._sizes.items()}
        for each in others:
            counts[each.tenant] = counts.get(each.tenant, 0) + 1
            sizes.setdefault(each.tenant, set()).add(each.answers)
        are_bodies_alike = all(max(each) <= ALIKE * min(each) for each in sizes.values())
        return are_bodies_alike and max(counts.values()) <= ALIKE * min(counts.values())

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
