"""A pass whose slices were reserved before the tokens were known is the one that would have been scheduled."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support.scheduling import scheduler_of, shares
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.next_slices import NextSlices
from megatron_runtime.engine.scheduling.schedule import Schedule
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice


class Reserving:
    """A scheduler whose next pass is reserved before each pass is settled, as by the engine."""

    def __init__(self, *, uses_reserved: bool, **limits: Any) -> None:
        self.scheduler = scheduler_of(**limits)
        self._uses_reserved = uses_reserved
        self.sequences: dict[int, Sequence] = {}

    def add(self, number: int, prompt: int, length: int, fields: dict[str, Any]) -> None:
        tokens = [number % 7] * prompt
        self.sequences[number] = sequence = Sequence(number, tokens, prompt, prompt + length, **fields)
        self.scheduler.add(sequence)

    def run(self, ended: int) -> list[Any]:
        """Runs a pass, after which sequences with ``ended`` as a divisor of their id end early; describes the pass."""
        schedule = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if all(part.samples and not part.num_log_probs for part in schedule.slices) and not self.scheduler.num_paused:
            self.scheduler.reserve_next(schedule.slices)
        if not self._uses_reserved:
            self.scheduler._next.begin([], 0)
        self.scheduler.settle(schedule.slices)
        for part in schedule.slices:
            sequence = part.sequence
            if part.samples:
                if len(sequence.tokens) < sequence.max_length:
                    sequence.tokens.append(7)
                if len(sequence.tokens) >= sequence.max_length or (ended and sequence.request_id % ended == 0):
                    self.scheduler.remove(sequence)
        self.scheduler.check_integrity()
        return description(schedule)


def description(schedule: Schedule) -> list[Any]:
    slices = [(part.sequence.request_id, *part[1:]) for part in schedule.slices]
    changes = (schedule.admitted, schedule.evicted, schedule.paused)
    return [slices, *([each.request_id for each in change] for change in changes)]


LIMITS = st.fixed_dictionaries(
    {
        "blocks": st.integers(12, 40),
        "paused_blocks": st.sampled_from([0, 6]),
        "shared_rows": st.sampled_from([None, 2]),
        "policy": st.sampled_from([None, PrefixCachingEvictionPolicy.LRU]),
    }
)
ARRIVALS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12), shares()), max_size=2)
STEPS = st.lists(st.tuples(ARRIVALS, st.sampled_from([0, 0, 0, 5])), min_size=5, max_size=30)


@settings(max_examples=150, deadline=None)
@given(LIMITS, STEPS)
def test_the_schedules_are_those_without_reserved_slices(limits: dict[str, Any], steps: list[Any]) -> None:
    first, other = (Reserving(uses_reserved=uses, **limits) for uses in (True, False))
    number = 0
    for arrivals, ended in steps:
        for arrival in arrivals:
            for each in (first, other):
                each.add(number, *arrival)
            number += 1
        assert first.run(ended) == other.run(ended)
    for request_id, sequence in first.sequences.items():
        twin = other.sequences[request_id]
        assert (sequence.tokens, sequence.num_begun, sequence.last_pass, sequence.blocks) == (
            twin.tokens,
            twin.num_begun,
            twin.last_pass,
            twin.blocks,
        )


@pytest.fixture
def decoding() -> Scheduler:
    scheduler = scheduler_of(100, max_requests=4)
    for number in range(3):
        scheduler.add(Sequence(number, [1, 2], 2, 40))
    schedule = scheduler.schedule()
    scheduler.reserve_next(schedule.slices)
    settle(scheduler, schedule.slices)
    return scheduler


def settle(scheduler: Scheduler, slices: list[SequenceSlice]) -> None:
    scheduler.settle(slices)
    for part in slices:
        part.sequence.tokens.append(7)


def test_reserved_slices_are_scheduled_themselves(decoding: Scheduler) -> None:
    first = decoding.schedule().slices
    reserved, ended = decoding.reserve_next(first)
    assert not ended
    settle(decoding, first)
    assert all(part is known for part, known in zip(decoding.schedule().slices, reserved, strict=True))


def test_an_admission_leaves_the_reserved_slices_as_they_are(decoding: Scheduler) -> None:
    """They are those of the pass that has begun."""
    first = decoding.schedule().slices
    reserved, _ = decoding.reserve_next(first)
    settle(decoding, first)
    decoding.add(Sequence(3, [1, 2], 2, 40))
    assert len(decoding.schedule().slices) == 4
    assert len(reserved) == 3


def test_reserved_slices_of_an_earlier_pass_are_not_used(decoding: Scheduler) -> None:
    withdrawn = decoding.schedule().slices
    decoding.reserve_next(withdrawn)
    decoding.withdraw(withdrawn)
    assert description(decoding.schedule())[0] == [(part.sequence.request_id, *part[1:]) for part in withdrawn]


@pytest.mark.parametrize("change", [{"next_log_prob": 3}, {"snapshot_ends": [3]}, {"tokens": [1, 2, 7, 7]}])
def test_reserved_slices_are_not_used_for_other_work(decoding: Scheduler, change: dict[str, Any]) -> None:
    sequences = [part.sequence for part in decoding.schedule().slices]
    for name, value in change.items():
        setattr(sequences[1], name, value)
    slices = [SequenceSlice(each, 2, 3, True, 0, each.num_evictions) for each in sequences]
    reserved = NextSlices(decoding.allocator, 4)
    reserved.reserve([part._replace(start=1, end=2) for part in slices])
    assert reserved.begin(sequences, 9) == []
