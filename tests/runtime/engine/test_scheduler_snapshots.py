"""Snapshots of recurrent states: where prompts leave them, which prefixes can be skipped, and their eviction."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import prefixes
from engine_support.prefixes import LIMITS, RandomPrefixes, sequence_of, starts_of
from engine_support.scheduling import Passes, run_pass
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.schedule import Schedule
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence, SettledPass

SYSTEM = [9] * 10


def scheduler_of(blocks: int = 40, snapshots: int = 8, **limits: Any) -> Scheduler:
    return prefixes.scheduler_of(blocks, snapshots=snapshots, **limits)


def slices_of(scheduler: Scheduler, prompt: list[int], **fields: Any) -> list[tuple[int, int]]:
    """The slices of a request with one token of answer, which is alone."""
    sequence = sequence_of(0, prompt)
    for name, value in fields.items():
        setattr(sequence, name, value)
    scheduler.add(sequence)
    slices: list[tuple[int, int]] = []
    done: list[Sequence] = []
    while not done:
        schedule, done = run_pass(scheduler)
        slices += [(part.start, part.end) for part in schedule.slices]
    return slices


class RandomSnapshots(RandomPrefixes):
    """Of a model with recurrent states. Those of sequences and snapshots are the tokens and weights of their origin."""

    @initialize(**LIMITS, snapshots=st.integers(1, 6))
    def begin(self, **limits: Any) -> None:
        self.start(**limits)
        self.states: dict[int, tuple[list[int], int]] = {}
        self.snapshots: dict[int, tuple[list[int], int]] = {}

    def compute(self, schedule: Schedule) -> None:
        super().compute(schedule)
        for part in schedule.slices:
            sequence, states = part.sequence, self.states.get(part.sequence.request_id)
            if sequence.first_snapshot is not None:
                states, sequence.first_snapshot = self.snapshots[sequence.first_snapshot], None
                assert states[1] == self.memory.weights, "a request begins with states of old weights"
            if part.start:
                assert states is not None, "a request begins without states"
                assert states[0] == sequence.tokens[: part.start], "a request has the states of other tokens"
            oldest = states[1] if states is not None and part.start else self.memory.weights
            self.states[sequence.request_id] = sequence.tokens[: part.end], oldest

    def store(self, settled: SettledPass) -> None:
        for sequence, slot in settled.snapshots:
            self.snapshots[slot] = self.states[sequence.request_id]
            assert len(self.snapshots[slot][0]) % self.scheduler.limits.block_size_tokens == 0


TestRandomSnapshots = RandomSnapshots.TestCase
TestRandomSnapshots.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.parametrize(("length", "end"), [(3, 0), (4, 0), (5, 4), (11, 8), (12, 8), (13, 12)])
def test_a_repeated_prompt_begins_at_its_last_end_of_a_block_before_the_last_token(length: int, end: int) -> None:
    scheduler, prompt = scheduler_of(), list(range(length))
    assert slices_of(scheduler, prompt) == ([(0, end), (end, length)] if end else [(0, length)])
    assert slices_of(scheduler, prompt) == [(end, length)]


def test_the_next_turn_of_a_chat_begins_at_the_end_of_the_last_one() -> None:
    scheduler, turns = scheduler_of(), list(range(50))
    assert slices_of(scheduler, turns[:11]) == [(0, 8), (8, 11)]
    assert slices_of(scheduler, turns[:21]) == [(8, 20), (20, 21)]
    assert slices_of(scheduler, turns[:23]) == [(20, 23)]


def test_what_prompts_have_in_common_has_a_snapshot_when_it_is_seen_again() -> None:
    scheduler = scheduler_of()
    first, second, third = ([*SYSTEM, *[token] * 9] for token in range(3))
    assert slices_of(scheduler, first) == [(0, 16), (16, 19)]
    assert slices_of(scheduler, second) == [(0, 8), (8, 16), (16, 19)]
    assert slices_of(scheduler, third) == [(8, 16), (16, 19)]
    for prompt in (first, second, third):
        assert slices_of(scheduler, [*prompt, 5]) == [(16, 20)]


def test_a_prompt_that_computes_known_blocks_again_gives_back_its_own() -> None:
    scheduler = scheduler_of()
    for token in range(2):
        scheduler.add(sequence_of(token, [*SYSTEM, *[token] * 9], 9))
        for _ in range(4):
            run_pass(scheduler)
    assert scheduler.allocator.num_used == 6 + 6 - 2
    scheduler.check_integrity()


def test_requests_wait_for_a_snapshot_that_another_one_will_leave_and_for_nothing_else() -> None:
    scheduler = scheduler_of(max_tokens=20)
    scheduler.add(sequence_of(0, [1] * 30, 5))
    for request_id, prompt in enumerate(([1] * 30, [1] * 6, [2] * 6), 1):
        scheduler.add(sequence_of(request_id, prompt, 5))
    passes = [starts_of(run_pass(scheduler)[0]) for _ in range(3)]
    assert passes == [{0: 0}, {0: 20}, {0: 28, 1: 28, 2: 0, 3: 0}]


def test_a_pass_in_flight_is_settled_before_the_next_one_changes_the_states_of_its_snapshot() -> None:
    scheduler = scheduler_of(passes=2)
    for token in range(2):
        scheduler.add(sequence_of(token, [token] * 9, 2))
    passes = Passes(scheduler)
    assert [starts_of(passes.run()[0]) for _ in range(4)] == [{0: 0}, {1: 0}, {0: 8}, {1: 8}]


def test_the_least_recently_used_snapshot_makes_room_for_another() -> None:
    scheduler = scheduler_of(snapshots=2)
    first, second, third = ([token] * 9 for token in range(3))
    for prompt in (first, second, first, third):
        slices_of(scheduler, prompt)
    assert slices_of(scheduler, first) == [(8, 9)]
    assert slices_of(scheduler, third) == [(8, 9)]
    assert slices_of(scheduler, second) == [(0, 8), (8, 9)]


def test_a_longer_prefix_keeps_the_snapshots_that_it_passes() -> None:
    scheduler = scheduler_of(snapshots=2)
    for length in (9, 17, 17):
        slices_of(scheduler, [1] * length)
    slices_of(scheduler, [2] * 9)  # replaces the snapshot after 16 tokens
    assert slices_of(scheduler, [*[1] * 9, 3]) == [(8, 10)]


def test_a_snapshot_ends_with_its_block() -> None:
    scheduler = scheduler_of(blocks=4)
    slices_of(scheduler, [1] * 9)
    slices_of(scheduler, [2] * 16)
    assert slices_of(scheduler, [1] * 9) == [(0, 8), (8, 9)]
    referenced = scheduler_of(policy=PrefixCachingEvictionPolicy.REF_ZERO)
    assert [slices_of(referenced, [1] * 9) for _ in range(2)] == [[(0, 8), (8, 9)]] * 2


def test_an_evicted_request_begins_at_its_snapshot() -> None:
    scheduler = scheduler_of()
    scheduler.add(sequence_of(0, [1] * 9, 5))
    run_pass(scheduler)
    run_pass(scheduler)
    scheduler.evict_all()
    assert starts_of(run_pass(scheduler)[0]) == {0: 8}


def test_an_evicted_prompt_leaves_a_snapshot_when_it_is_computed_again() -> None:
    scheduler = scheduler_of(max_tokens=8)
    scheduler.add(sequence_of(0, [1] * 13))
    run_pass(scheduler)
    scheduler.evict_all()
    assert [starts_of(run_pass(scheduler)[0]) for _ in range(3)] == [{0: 0}, {0: 8}, {0: 12}]
    assert slices_of(scheduler, [1] * 13) == [(12, 13)]


def test_states_across_a_weight_update_leave_no_snapshot() -> None:
    scheduler = scheduler_of(max_tokens=8)
    scheduler.add(sequence_of(0, [1] * 13, 1))
    run_pass(scheduler)
    scheduler.forget_prefixes()
    run_pass(scheduler)
    assert slices_of(scheduler, [1] * 9) == [(0, 8), (8, 9)]


def test_a_request_with_prompt_log_probs_leaves_a_snapshot_and_skips_nothing() -> None:
    scheduler = scheduler_of()
    assert [slices_of(scheduler, [1] * 9, next_log_prob=1) for _ in range(2)] == [[(0, 8), (8, 9)]] * 2
    assert slices_of(scheduler, [1] * 9, next_log_prob=9) == [(8, 9)]


def test_prompts_with_equal_hashes_share_no_snapshot() -> None:
    scheduler = scheduler_of()
    slices_of(scheduler, [1] * 9, block_hashes=[5, 6])
    assert slices_of(scheduler, [2] * 9, block_hashes=[5, 6]) == [(0, 8), (8, 9)]
    assert slices_of(scheduler, [2] * 9, block_hashes=[5, 6]) == [(0, 8), (8, 9)]


def test_without_hashes_there_is_no_snapshot() -> None:
    assert slices_of(scheduler_of(), [1] * 9, block_hashes=[]) == [(0, 9)]
