"""The scheduler over random histories of requests; without tensors or a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine_support.scheduling import SchedulerLives, run_pass, scheduler_of, shares
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from megatron_runtime.engine.scheduling.sequence import Sequence


def sequence_of(request_id: int, prompt: int, answer: int, priority: int = 0) -> Sequence:
    return Sequence(request_id, list(range(prompt)), prompt, prompt + answer, priority=priority)


class RandomLives(SchedulerLives):
    """Adds, passes, aborts and suspensions in any order."""

    passes_per_token = 2  # as many as for one request after the other

    @initialize(
        blocks=st.integers(4, 24),
        block_size=st.integers(1, 5),
        max_requests=st.integers(1, 6),
        spare_tokens=st.integers(0, 20),
        chunked=st.booleans(),
        paused_blocks=st.integers(0, 8),
        passes=st.integers(1, 4),
        shared_rows=st.sampled_from([None, 1, 2, 4]),
        prompt_logits=st.sampled_from([None, 0, 1, 5]),
    )
    def begin(
        self,
        blocks: int,
        block_size: int,
        max_requests: int,
        spare_tokens: int,
        chunked: bool,
        paused_blocks: int,
        passes: int,
        shared_rows: int | None,
        prompt_logits: int | None,
    ) -> None:
        scheduler = scheduler_of(
            blocks,
            block_size=block_size,
            max_requests=max_requests,
            max_tokens=max_requests + spare_tokens,
            chunked=chunked,
            paused_blocks=paused_blocks,
            passes=passes,
            shared_rows=shared_rows,
            prompt_logits=prompt_logits,
        )
        self.use(scheduler)
        self.next_id = 0

    @rule(
        prompt=st.integers(1, 30),
        answer=st.integers(1, 30),
        priority=st.integers(-1, 1),
        scored=st.none() | st.integers(1, 30),
        shares=shares(),
    )
    def add(self, prompt: int, answer: int, priority: int, scored: int | None, shares: dict[str, Any]) -> None:
        sequence = replace(sequence_of(self.next_id, prompt, answer, priority), **shares)
        sequence.next_log_prob = scored
        if not self.scheduler.can_ever_fit(sequence):
            return
        if not self.scheduler.limits.chunked_prefill and prompt > self.scheduler.limits.max_tokens:
            return
        self.alive[self.next_id] = sequence
        self.scheduler.add(sequence)
        self.next_id += 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), milliseconds=st.integers(0, 20))
    def take_long_for_a_mask(self, data: st.DataObject, milliseconds: int) -> None:
        self.alive[data.draw(st.sampled_from(sorted(self.alive)))].note_mask(milliseconds)

    @rule()
    def suspend_and_recompute(self) -> None:
        self.scheduler.evict_all()
        assert self.scheduler.allocator.num_used == 0


TestRandomLives = RandomLives.TestCase
TestRandomLives.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12), st.integers(0, 10))
@settings(max_examples=40)
def test_the_oldest_request_advances_in_every_pass(sizes: list[tuple[int, int]], paused_blocks: int) -> None:
    scheduler = scheduler_of(10, paused_blocks=paused_blocks)
    for request_id, (prompt, answer) in enumerate(sizes):
        scheduler.add(sequence_of(request_id, prompt, answer))
    alive = set(range(len(sizes)))
    while alive:
        schedule, done = run_pass(scheduler)
        assert schedule.slices[0].sequence.request_id == min(alive)
        assert min(alive) not in {sequence.request_id for sequence in schedule.evicted + schedule.paused}
        alive -= {sequence.request_id for sequence in done}


def test_prefill_and_decode_share_a_pass() -> None:
    scheduler = scheduler_of(20)
    scheduler.add(sequence_of(0, 5, 4))
    run_pass(scheduler)
    scheduler.add(sequence_of(1, 7, 4))
    schedule, _ = run_pass(scheduler)
    assert [(part.sequence.request_id, part.start, part.length) for part in schedule.slices] == [(0, 5, 1), (1, 0, 7)]


def test_a_long_prompt_is_cut_to_the_token_budget() -> None:
    scheduler = scheduler_of(20, max_tokens=8)
    scheduler.add(sequence_of(0, 3, 9))
    scheduler.add(sequence_of(1, 12, 2))
    cuts = [[(part.start, part.length) for part in run_pass(scheduler)[0].slices] for _ in range(3)]
    assert cuts == [[(0, 3), (0, 5)], [(3, 1), (5, 7)], [(4, 1), (12, 1)]]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_is_cut_where_its_pass_has_no_more_logits(chunked: bool) -> None:
    scheduler = scheduler_of(40, chunked=chunked, prompt_logits=4)
    scheduler.add(sequence_of(0, 3, 9))
    run_pass(scheduler)
    for request_id, scored in ((1, 1), (2, 6)):
        sequence = sequence_of(request_id, 12, 1)
        sequence.next_log_prob = scored
        scheduler.add(sequence)
    passes = [[(part.start, part.end, part.num_logits) for part in run_pass(scheduler)[0].slices] for _ in range(3)]
    assert passes == [
        [(3, 4, 1), (0, 5, 5), (0, 6, 1)],  # no logits before the first token that is scored
        [(4, 5, 1), (5, 10, 5), (6, 7, 1)],
        [(5, 6, 1), (10, 12, 2), (7, 11, 4)],
    ]


def test_without_chunked_prefill_a_prompt_waits_for_a_pass_with_room_for_it() -> None:
    scheduler = scheduler_of(20, max_tokens=8, chunked=False)
    scheduler.add(sequence_of(0, 3, 2))
    scheduler.add(sequence_of(1, 8, 2))
    assert [part.length for part in run_pass(scheduler)[0].slices] == [3]
    assert [part.length for part in run_pass(scheduler)[0].slices] == [1]
    assert [part.length for part in run_pass(scheduler)[0].slices] == [8]


def test_requests_are_admitted_in_their_order_even_if_a_later_one_would_fit() -> None:
    scheduler = scheduler_of(6)
    scheduler.add(sequence_of(0, 16, 4))
    scheduler.add(sequence_of(1, 16, 4))
    scheduler.add(sequence_of(2, 2, 2))
    schedule, _ = run_pass(scheduler)
    assert [part.sequence.request_id for part in schedule.slices] == [0]


def test_the_newest_request_is_evicted_and_admitted_again_first() -> None:
    scheduler = scheduler_of(5)
    scheduler.add(sequence_of(0, 7, 10))
    scheduler.add(sequence_of(1, 7, 3))
    run_pass(scheduler)
    scheduler.add(sequence_of(2, 3, 3))
    evicted: list[Sequence] = []
    while not evicted:
        evicted = run_pass(scheduler)[0].evicted
    assert [sequence.request_id for sequence in evicted] == [1]
    order: list[int] = []
    while scheduler.num_running or scheduler.num_waiting:
        order += [sequence.request_id for sequence in run_pass(scheduler)[1]]
    assert order == [0, 1, 2]


@pytest.mark.parametrize(("allowed", "evictions"), [(2, 0), (1, 1)])
def test_a_request_without_a_free_block_is_paused_with_its_blocks_if_allowed(allowed: int, evictions: int) -> None:
    scheduler = scheduler_of(5, paused_blocks=allowed)
    scheduler.add(sequence_of(0, 8, 4))
    scheduler.add(sequence_of(1, 8, 9))
    paused: list[tuple[int, int]] = []
    evicted: list[Sequence] = []
    passes: list[dict[int, int]] = []
    while scheduler.num_running or scheduler.num_waiting:
        schedule, _ = run_pass(scheduler)
        passes.append({part.sequence.request_id: part.length for part in schedule.slices})
        paused += [(sequence.request_id, len(sequence.blocks)) for sequence in schedule.paused]
        evicted += schedule.evicted
    assert paused == ([] if evictions else [(1, 2)])
    assert len(evicted) == evictions
    recomputed = 9 if evictions else 1
    assert passes == [{0: 8, 1: 8}] + [{0: 1}] * 3 + [{1: recomputed}] + [{1: 1}] * 7


def test_an_abort_of_a_paused_request_frees_its_blocks() -> None:
    scheduler = scheduler_of(5, paused_blocks=2)
    second = sequence_of(1, 8, 9)
    scheduler.add(sequence_of(0, 8, 4))
    scheduler.add(second)
    run_pass(scheduler)
    assert run_pass(scheduler)[0].paused == [second]
    assert scheduler.num_paused == 1
    scheduler.remove(second)
    assert scheduler.num_paused == 0
    scheduler.check_integrity()


def test_who_is_more_urgent_is_admitted_first_and_equals_in_their_order() -> None:
    scheduler = scheduler_of(20, max_requests=1)
    for request_id, priority in enumerate([0, 5, -1, 5, 0]):
        scheduler.add(sequence_of(request_id, 3, 1, priority))
    order: list[int] = []
    while scheduler.num_running or scheduler.num_waiting:
        order += [sequence.request_id for sequence in run_pass(scheduler)[1]]
    assert order == [2, 0, 4, 1, 3]


def test_the_lowest_priority_is_evicted_even_if_it_arrived_first() -> None:
    scheduler = scheduler_of(5)
    scheduler.add(sequence_of(0, 7, 10, priority=1))
    scheduler.add(sequence_of(1, 7, 10, priority=0))
    evicted: list[Sequence] = []
    while not evicted:
        evicted = run_pass(scheduler)[0].evicted
    assert [sequence.request_id for sequence in evicted] == [0]


def test_a_long_prompt_with_priority_leaves_a_token_for_each_running_request() -> None:
    scheduler = scheduler_of(20, max_tokens=8)
    for request_id in range(2):
        scheduler.add(sequence_of(request_id, 2, 9, priority=1))
    run_pass(scheduler)
    scheduler.add(sequence_of(2, 20, 2))
    cuts = [{part.sequence.request_id: part.length for part in run_pass(scheduler)[0].slices} for _ in range(4)]
    assert cuts == [{0: 1, 1: 1, 2: 6}] * 3 + [{0: 1, 1: 1, 2: 2}]


def test_suspension_keeps_the_order_of_the_queue() -> None:
    scheduler = scheduler_of(20, max_requests=2)
    for request_id in range(4):
        scheduler.add(sequence_of(request_id, 3, 3))
    run_pass(scheduler)
    scheduler.evict_all()
    assert scheduler.num_waiting == 4
    schedule, _ = run_pass(scheduler)
    assert [sequence.request_id for sequence in schedule.admitted] == [0, 1]


def test_a_sequence_that_never_fits_is_refused_at_submission() -> None:
    scheduler = scheduler_of(2, block_size=4)
    assert scheduler.can_ever_fit(sequence_of(0, 5, 4))
    assert not scheduler.can_ever_fit(sequence_of(0, 5, 5))
    with pytest.raises(AssertionError, match="never fits"):
        scheduler.add(sequence_of(0, 5, 5))


def test_sequences_with_slow_masks_take_turns_and_the_others_are_in_every_pass() -> None:
    scheduler = scheduler_of(20)
    sequences = [sequence_of(request_id, 3, 9) for request_id in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_pass(scheduler)
    for slow in sequences[2:]:
        slow.mask_milliseconds = 4  # the budget is 5
    passes = [[part.sequence.request_id for part in run_pass(scheduler)[0].slices] for _ in range(5)]
    assert passes == [[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 1, 2]]
    for slow in sequences[2:]:
        slow.mask_milliseconds = 2
    assert [len(run_pass(scheduler)[0].slices) for _ in range(2)] == [4, 4]


def test_the_most_urgent_sequence_is_in_every_pass_even_with_a_slow_mask() -> None:
    scheduler = scheduler_of(20)
    sequences = [sequence_of(request_id, 3, 9) for request_id in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_pass(scheduler)
    for slow in sequences:
        slow.mask_milliseconds = 30
    passes = [[part.sequence.request_id for part in run_pass(scheduler)[0].slices] for _ in range(4)]
    assert passes == [[0, 1], [0, 2], [0, 3], [0, 1]]


def test_the_expected_time_of_a_mask_rises_at_once_and_falls_by_half() -> None:
    sequence = sequence_of(0, 3, 9)
    expected = []
    for milliseconds in (0, 9, 1, 0, 0, 0):
        sequence.note_mask(milliseconds)
        expected.append(sequence.mask_milliseconds)
    assert expected == [0, 9, 4, 2, 1, 0]


def test_passes_that_are_under_way_share_the_sequences() -> None:
    scheduler = scheduler_of(20, passes=2)
    for request_id in range(5):
        scheduler.add(sequence_of(request_id, 3, 9))
    begun = [scheduler.schedule().slices for _ in range(3)]
    assert [[part.sequence.request_id for part in slices] for slices in begun] == [[0, 1, 2], [3, 4], []]
    assert not scheduler.has_idle
    scheduler.settle(begun[0])
    for part in begun[0]:
        part.sequence.tokens.append(7)
    assert [part.sequence.request_id for part in scheduler.schedule().slices] == [0, 1, 2]


def test_the_chunks_of_a_long_prompt_are_in_passes_one_behind_the_other() -> None:
    scheduler = scheduler_of(20, passes=3, max_tokens=8)
    scheduler.add(sequence_of(0, 20, 9))
    begun = [scheduler.schedule().slices for _ in range(3)]
    assert [(part.start, part.length) for slices in begun for part in slices] == [(0, 8), (8, 8), (16, 4)]
    assert not scheduler.has_idle
    for slices in begun:
        scheduler.settle(slices)
    assert begun[0][0].sequence.num_computed == 20


def test_a_withdrawn_pass_is_scheduled_again() -> None:
    scheduler = scheduler_of(20, passes=2, max_tokens=8)
    scheduler.add(sequence_of(0, 20, 9))
    first, second = scheduler.schedule().slices, scheduler.schedule().slices
    scheduler.withdraw(second)
    scheduler.settle(first)
    assert scheduler.schedule().slices == second


def test_results_for_a_request_that_lost_its_blocks_are_dropped() -> None:
    scheduler = scheduler_of(3, passes=2)
    old, new = sequence_of(0, 4, 9), sequence_of(1, 4, 5)
    for sequence in (old, new):
        scheduler.add(sequence)
    first, second = scheduler.schedule().slices, scheduler.schedule().slices
    assert [part.sequence for part in first + second] == [old, new]
    scheduler.settle(first)
    old.tokens += range(5)
    assert scheduler.schedule().evicted == [new]
    scheduler.settle(second)
    assert not second[0].counts
    assert new.num_computed == 0
