"""Shared prefixes over random histories of requests, with hash collisions; without tensors or a model."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support.prefixes import BLOCK, LIMITS, LRU, RandomPrefixes, scheduler_of, sequence_of, starts_of
from engine_support.scheduling import run_pass
from hypothesis import settings
from hypothesis.stateful import initialize

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence


class RandomSharing(RandomPrefixes):
    """Of a model with attention alone."""

    @initialize(**LIMITS)
    def begin(self, **limits: Any) -> None:
        self.start(**limits)


TestRandomSharing = RandomSharing.TestCase
TestRandomSharing.settings = settings(max_examples=80, stateful_step_count=40)


def test_a_second_request_skips_the_blocks_that_it_shares_with_the_first() -> None:
    scheduler = scheduler_of(20)
    scheduler.add(sequence_of(0, [1] * 10, 9))
    run_pass(scheduler)
    scheduler.add(sequence_of(1, [1] * 9 + [2, 3], 9))
    schedule, _ = run_pass(scheduler)
    assert starts_of(schedule) == {0: 10, 1: 8}
    first, second = (part.sequence for part in schedule.slices)
    assert first.blocks[:2] == second.blocks[:2]
    assert not set(first.blocks[2:]) & set(second.blocks[2:])


def test_at_least_the_last_prompt_token_is_computed_again() -> None:
    scheduler = scheduler_of(20)
    for request_id in range(2):
        scheduler.add(sequence_of(request_id, [1] * 12))
        schedule, _ = run_pass(scheduler)
    assert starts_of(schedule) == {1: 8}


def test_a_request_waits_one_pass_for_a_prefix_that_another_one_computes() -> None:
    scheduler = scheduler_of(40)
    for request_id in range(3):
        scheduler.add(sequence_of(request_id, [1] * 8 + [request_id], 5))
    scheduler.add(sequence_of(3, [2] * 6, 5))
    assert starts_of(run_pass(scheduler)[0]) == {0: 0}
    assert starts_of(run_pass(scheduler)[0]) == {0: 9, 1: 8, 2: 8, 3: 0}


def test_a_request_waits_for_a_prefix_that_is_computed_in_chunks_and_for_no_longer() -> None:
    scheduler = scheduler_of(40, max_tokens=10)
    scheduler.add(sequence_of(0, [1] * 18, 5))
    scheduler.add(sequence_of(1, [1] * 12 + [2], 5))
    assert starts_of(run_pass(scheduler)[0]) == {0: 0}
    assert starts_of(run_pass(scheduler)[0]) == {0: 10}
    assert starts_of(run_pass(scheduler)[0]) == {0: 18, 1: 12}


def test_a_request_with_prompt_log_probs_computes_its_whole_prompt() -> None:
    scheduler = scheduler_of(40)
    scheduler.add(sequence_of(0, [1] * 12, 5))
    run_pass(scheduler)
    for request_id, first_wanted in ((1, 1), (2, 9), (3, 12)):
        sequence = sequence_of(request_id, [1] * 12, 5)
        sequence.next_log_prob = first_wanted
        scheduler.add(sequence)
    assert starts_of(run_pass(scheduler)[0]) == {0: 12, 1: 0, 2: 8, 3: 8}


def test_different_prompts_with_equal_hashes_share_no_blocks() -> None:
    scheduler = scheduler_of(20)
    scheduler.add(sequence_of(0, [1] * 9, 5, num_hashes=1))
    run_pass(scheduler)
    scheduler.add(sequence_of(1, [2] * 9, 5, num_hashes=1))
    schedule, _ = run_pass(scheduler)
    assert starts_of(schedule) == {0: 9, 1: 0}


def test_equal_blocks_after_different_prefixes_are_different_blocks() -> None:
    scheduler = scheduler_of(20)
    for request_id, beginning in enumerate((1, 2)):
        sequence = sequence_of(request_id, [beginning] * 4 + [3] * 5, 5)
        sequence.block_hashes = [beginning, 77]
        scheduler.add(sequence)
        assert starts_of(run_pass(scheduler)[0])[request_id] == 0


@pytest.mark.parametrize(("policy", "start"), [(LRU, 8), (PrefixCachingEvictionPolicy.REF_ZERO, 0)])
def test_the_policy_decides_whether_a_prefix_outlives_its_last_owner(
    policy: PrefixCachingEvictionPolicy, start: int
) -> None:
    scheduler = scheduler_of(20, policy=policy)
    scheduler.add(sequence_of(0, [1] * 9))
    run_pass(scheduler)
    assert scheduler.allocator.num_used == 0
    assert scheduler.allocator.num_evictable == start // BLOCK
    scheduler.add(sequence_of(1, [1] * 9))
    assert starts_of(run_pass(scheduler)[0]) == {1: start}


def test_least_recently_used_blocks_are_evicted_first_and_leaves_before_their_parents() -> None:
    scheduler = scheduler_of(6)
    for request_id, prompt in enumerate(([1] * 13, [2] * 8)):
        scheduler.add(sequence_of(request_id, prompt))
        run_pass(scheduler)
    assert scheduler.allocator.num_evictable == 5
    scheduler.add(sequence_of(2, [3] * 12))  # needs three blocks, and one was free
    run_pass(scheduler)
    prefixes = scheduler.allocator.prefixes
    assert prefixes is not None
    assert [len(prefixes.match(sequence_of(3, [token] * 13))) for token in (1, 2, 3)] == [1, 2, 3]


def test_a_prefix_in_use_is_not_evicted_for_its_own_request() -> None:
    scheduler = scheduler_of(4)
    scheduler.add(sequence_of(0, [1] * 12))
    run_pass(scheduler)
    scheduler.add(sequence_of(1, [1] * 13, 3))
    assert starts_of(run_pass(scheduler)[0]) == {1: 12}
    assert scheduler.allocator.num_free == 0


def test_an_evicted_request_reuses_its_remaining_blocks() -> None:
    scheduler = scheduler_of(20)
    scheduler.add(sequence_of(0, [1] * 9, 5))
    run_pass(scheduler)
    scheduler.evict_all()
    assert starts_of(run_pass(scheduler)[0]) == {0: 8}


def test_blocks_computed_across_a_weight_update_are_not_shared() -> None:
    scheduler = scheduler_of(20, max_tokens=10)
    scheduler.add(sequence_of(0, [1] * 16, 5))
    run_pass(scheduler)
    scheduler.forget_prefixes()
    run_pass(scheduler)
    scheduler.add(sequence_of(1, [1] * 9, 5))
    assert starts_of(run_pass(scheduler)[0]) == {0: 16, 1: 0}


def test_generated_tokens_are_shared_only_once_they_were_read_as_a_prompt() -> None:
    scheduler = scheduler_of(20)
    scheduler.add(sequence_of(0, [1] * 6, 6))
    done: list[Sequence] = []
    while not done:
        done = run_pass(scheduler)[1]
    answered = done[0].tokens
    assert starts_of_next(scheduler, 1, answered) == 4
    assert starts_of_next(scheduler, 2, [*answered, 1]) == 12


def starts_of_next(scheduler: Scheduler, request_id: int, prompt: list[int]) -> int:
    scheduler.add(sequence_of(request_id, prompt))
    return starts_of(run_pass(scheduler)[0])[request_id]
