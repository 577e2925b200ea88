"""Which rows a pass has where the answers of large bodies or tenants run beside those of small ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from megatron_runtime.engine.scheduling.running_sequences import ALIKE, RunningSequences
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.engine.scheduling.waiting_sequences import WaitingSequences

_Bodies = dict[Hashable, list[Sequence]]
_Urgency = tuple[bool, int, int]
"""Lower values first: the most urgent sequence, then those that waited longest, then those with the fewest tokens."""
_Size = tuple[int, int]
"""Priority, and answers of the body or running sequences of the tenant."""
LATELY_PASSES = 16
"""On two cores and with a small model about two seconds of passes with few rows."""


@dataclass(frozen=True)
class RowShares:
    """The rows of one pass.

    A pass takes longer with more rows, and all of its requests wait for it. So if a body or a tenant has more than
    ``ALIKE`` times as many answers as the smallest one, the pass has no more rows than with ``ALIKE`` times the
    smallest one for each, or ``shared_rows`` if that is more. The rows are shared equally by the tenants, those of a
    tenant by its bodies, and the answers of a body take turns.
    """

    most: int | None = None
    """Number of rows; None: all running sequences are in the pass."""
    held: frozenset[int] = frozenset()
    """Request ids of the running sequences that wait for a later pass."""
    large_tenants: frozenset[str] = frozenset()
    """Those beyond the limit."""
    most_answers: dict[str, int] = field(default_factory=dict)
    """By tenant, the limit of its bodies."""

    def among(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The running sequences without those that wait for a later pass."""
        return [each for each in running if each.request_id not in self.held] if self.held else list(running)

    def is_large(self, sequence: Sequence) -> bool:
        """Whether the body or the tenant of a sequence is beyond its limit."""
        tenant = sequence.tenant
        return tenant in self.large_tenants or sequence.answers > self.most_answers.get(tenant, sequence.answers)

    def delays(self, sequence: Sequence, num_rows: int) -> bool:
        """Whether a sequence of the queue has to wait because the pass has ``num_rows`` rows already."""
        return self.most is not None and num_rows >= self.most and self.is_large(sequence)


_ALL = RowShares()


class RowSharing:
    """Decides the rows of the passes of a scheduler.

    A function of the sequences and of the passes before, and so equal on all ranks. Only the smallest of the highest
    priority limit the others, also for ``LATELY_PASSES`` after they have ended: clients that ask one request after the
    other would otherwise meet passes with all rows between their requests. The most urgent sequence is never held, nor
    any other one forever: those that waited longest go first.
    """

    def __init__(self, running: RunningSequences, waiting: WaitingSequences) -> None:
        self._running = running
        self._waiting = waiting
        self._smallest = _Smallest(lambda each: (each.priority, each.answers))
        self._of_smallest_tenant = _Smallest(lambda each: (each.priority, max(running.count(each.tenant), 1)))

    def rows(self, number: int, shared_rows: int | None, *, admits: bool) -> RowShares:
        """The rows of a pass. Call it for every pass.

        Args:
            number: Of the pass; each has the next one.
            shared_rows: A pass of so many rows takes little longer than one of a single row; None: so do all.
            admits: Whether sequences of the queue may begin with it; a row is kept for the first one.
        """
        if shared_rows is None:
            return _ALL
        running, num_waiting = self._running, len(self._waiting) if admits else 0
        expected = self._expected(number, self._waiting.first if num_waiting else None)
        if len(running) + num_waiting < shared_rows or running.are_alike(expected):
            return _ALL
        tenants = _by_tenant_and_body(chain(running, expected))
        urgent = min(each.priority for each in (*islice(running, 1), *expected))
        most_answers = {tenant: _limit_of_bodies(bodies, urgent) for tenant, bodies in tenants.items()}
        rows = {
            tenant: sum(min(len(body), most_answers[tenant]) for body in bodies.values())
            for tenant, bodies in tenants.items()
        }
        largest = ALIKE * min(
            rows[tenant]
            for tenant, bodies in tenants.items()
            if any(_is_urgent(body, urgent) for body in bodies.values())
        )
        most = max(shared_rows, sum(min(each, largest) for each in rows.values()))
        if len(running) + max(num_waiting, len(expected)) <= most:
            return _ALL
        return RowShares(
            most,
            _held(running, tenants, most),
            frozenset(tenant for tenant, each in rows.items() if each > largest),
            most_answers,
        )

    def _expected(self, number: int, head: Sequence | None) -> list[Sequence]:
        """The sequences that have no row yet and for which one is kept in pass ``number``: ``head``, and such as were
        the smallest lately and have ended."""
        expected = [] if head is None else [head]
        present = [*self._running, *expected]
        for smallest in (self._smallest, self._of_smallest_tenant):
            lately = smallest.lately(present, number)
            if lately is not None and lately not in self._running and lately not in expected:
                expected.append(lately)
        return expected


class _Smallest:
    """The smallest sequence of the last passes, which may have ended."""

    def __init__(self, size: Callable[[Sequence], _Size]) -> None:
        self._size_of = size
        self._sequence: Sequence | None = None
        self._size: _Size = (0, 0)
        self._last_pass = 0
        """The last one for which the sequence counts."""

    def lately(self, present: list[Sequence], number: int) -> Sequence | None:
        """The sequence for pass ``number``, for which these are ``present``."""
        if number > self._last_pass:
            self._sequence = None
        smallest = min(present, key=self._size_of, default=None)
        if smallest is not None and (self._sequence is None or self._size_of(smallest) <= self._size):
            self._sequence, self._size = smallest, self._size_of(smallest)
            self._last_pass = number + LATELY_PASSES
        return self._sequence


def _by_tenant_and_body(sequences: Iterable[Sequence]) -> dict[str, _Bodies]:
    tenants: dict[str, _Bodies] = {}
    for each in sequences:
        body = each.request_id if each.body is None else each.body
        tenants.setdefault(each.tenant, {}).setdefault(body, []).append(each)
    return tenants


def _is_urgent(body: list[Sequence], priority: int) -> bool:
    return any(each.priority <= priority for each in body)


def _limit_of_bodies(bodies: _Bodies, priority: int) -> int:
    """The most answers of a body of this tenant that is not large."""
    urgent = [body[0].answers for body in bodies.values() if _is_urgent(body, priority)]
    return ALIKE * min(urgent, default=max(body[0].answers for body in bodies.values()))


def _held(running: RunningSequences, tenants: dict[str, _Bodies], most: int) -> frozenset[int]:
    """Those that are in none of the ``most`` rows."""
    first = next(iter(running), None)

    def urgency(sequence: Sequence) -> _Urgency:
        return sequence is not first, sequence.last_pass, sequence.num_begun

    answers = (
        [sorted((each for each in body if each.num_left), key=urgency) for body in bodies.values()]
        for bodies in tenants.values()
    )
    dealt = _deal((_deal(bodies, urgency) for bodies in answers), urgency)
    chosen = {each.request_id for each in islice(dealt, most)}
    return frozenset(each.request_id for each in running if each.request_id not in chosen)


def _deal(groups: Iterable[Iterable[Sequence]], urgency: Callable[[Sequence], _Urgency]) -> Iterator[Sequence]:
    """The first of each group, then the second of each, and so on; in each round by urgency."""
    for row in zip_longest(*groups):
        yield from sorted((each for each in row if each is not None), key=urgency)
