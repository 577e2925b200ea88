"""Bodies with many answers, and tenants with many bodies, delay others by their fair share at most."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_support.clients import client_of
from engine_support.scheduling import run_pass, scheduler_of, shares
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence


def passes_until_done(scheduler: Scheduler, sequences: list[Sequence]) -> tuple[int, list[Sequence]]:
    """How many passes these sequences take, and what was evicted meanwhile."""
    left, evicted = set(sequences), []
    for number in itertools.count(1):
        schedule, done = run_pass(scheduler)
        evicted += schedule.evicted
        left -= set(done)
        if not left:
            return number, evicted
    raise AssertionError("unreachable")


@pytest.mark.parametrize("blocks", [1000, 90], ids=["no place is free", "no block is free"])
def test_a_small_body_does_not_wait_for_large_ones_that_fill_the_engine(blocks: int) -> None:
    scheduler = scheduler_of(blocks, max_requests=64, max_tokens=80)
    client = client_of(scheduler)
    for _ in range(4):
        client.send(32)
    for _ in range(10):
        run_pass(scheduler)
    for _ in range(5):
        passes, evicted = passes_until_done(scheduler, client.send(1, length=4))
        assert passes <= 5  # a pass for each token; a sequence that lost its blocks delays admissions by one pass
        assert all(each.answers == 32 for each in evicted)
    assert blocks < 1000 or sum(each.num_evictions for each in scheduler._waiting) == 1


def test_one_place_is_made_once_and_then_serves_one_small_body_after_the_other() -> None:
    scheduler = scheduler_of(1000, max_requests=16)
    client = client_of(scheduler)
    client.send(128)
    evictions = [len(passes_until_done(scheduler, client.send(1, length=4))[1]) for _ in range(8)]
    assert evictions == [0] * 8  # the first one came before any pass
    for _ in range(3):
        run_pass(scheduler)
    evictions = [len(passes_until_done(scheduler, client.send(1, length=4))[1]) for _ in range(8)]
    assert max(evictions) <= 1


def test_a_tenant_with_many_bodies_leaves_others_an_equal_share() -> None:
    scheduler = scheduler_of(1000, max_requests=8, max_tokens=64)
    many, few = client_of(scheduler), client_of(scheduler, "few")
    for _ in range(100):
        many.send(1)
    run_pass(scheduler)
    own = [few.send(1) for _ in range(6)]
    schedule, _ = run_pass(scheduler)
    assert [each.tenant for each in schedule.admitted] == ["few"] * 4
    assert [each.tenant for each in schedule.evicted] == [""] * 4
    for _ in range(5):
        assert not run_pass(scheduler)[0].evicted
    assert sum(body[0].is_running for body in own) == 4


def test_a_tenant_s_small_body_does_not_wait_for_its_large_one() -> None:
    scheduler = scheduler_of(1000, max_requests=8)
    one, other = client_of(scheduler), client_of(scheduler, "other")
    one.send(64)
    other.send(64)
    run_pass(scheduler)
    assert passes_until_done(scheduler, one.send(1, length=4))[0] == 4


@pytest.mark.parametrize("answers", [1, 2, 8])
def test_bodies_of_equal_size_are_served_in_their_order_without_evictions(answers: int) -> None:
    scheduler = scheduler_of(1000, max_requests=12)
    client = client_of(scheduler)
    order = [each for _ in range(6) for each in client.send(answers, length=5)]
    admitted: list[Sequence] = []
    while scheduler.num_running or scheduler.num_waiting:
        if len(order) < 12 * answers:
            order += client.send(answers, length=5)
        schedule, _ = run_pass(scheduler)
        assert not schedule.evicted
        admitted += schedule.admitted
    assert admitted == order


def test_a_large_body_ends_although_small_ones_arrive_in_every_pass() -> None:
    scheduler = scheduler_of(1000, max_requests=4)
    client = client_of(scheduler)
    large = client.send(16, length=8)
    left, passes = set(large), 0
    while left:
        client.send(1, length=2)
        if scheduler.num_waiting < 40:
            client.send(1, length=2)
        left -= set(run_pass(scheduler)[1])
        passes += 1
    assert passes < 1000


def test_none_is_evicted_for_a_lower_priority_nor_for_a_similar_body() -> None:
    scheduler = scheduler_of(1000, max_requests=4)
    client = client_of(scheduler)
    client.send(8)
    run_pass(scheduler)
    client.send(1, priority=1)
    assert not run_pass(scheduler)[0].evicted
    scheduler = scheduler_of(1000, max_requests=4)
    client = client_of(scheduler)
    client.send(4)
    run_pass(scheduler)
    client.send(3)
    assert not run_pass(scheduler)[0].evicted


def test_sequences_are_not_evicted_where_all_of_them_would_not_suffice() -> None:
    scheduler = scheduler_of(40, max_requests=8)
    one, other = client_of(scheduler), client_of(scheduler, "other")
    one.send(1, prompt=60, length=4)
    one.send(1, prompt=60, length=4)
    run_pass(scheduler)
    other.send(1, prompt=90)
    assert [run_pass(scheduler)[0].evicted for _ in range(2)] == [[], []]


def test_the_prompt_of_a_body_is_computed_once_although_its_answers_make_room_for_others() -> None:
    scheduler = scheduler_of(400, policy=PrefixCachingEvictionPolicy.LRU, max_requests=8)
    client = client_of(scheduler)
    large = client.send(32, prompt=41, length=6)
    left, computed = set(large), 0
    for number in itertools.count():
        if number % 3 == 2:
            client.send(1, length=4)
        schedule, done = run_pass(scheduler)
        computed += sum(part.length for part in schedule.slices if part.sequence in left and part.start < 40)
        left -= set(done)
        if not left:
            break
    assert 40 <= computed <= 41


@settings(max_examples=25, deadline=None)
@given(
    plan=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), shares()), min_size=1, max_size=12),
    blocks=st.integers(4, 12),
    max_requests=st.integers(1, 4),
    shared_rows=st.sampled_from([None, 1, 2]),
)
def test_every_request_ends_in_time_however_many_others_arrive(
    plan: list[tuple[int, int, dict[str, Any]]], blocks: int, max_requests: int, shared_rows: int | None
) -> None:
    """The bound: while at most ``most`` sequences are open, a sequence that ends advances the virtual time by 1 / most,
    and the first in order, which is never evicted, ends after ``longest`` passes."""
    scheduler = scheduler_of(blocks, max_requests=max_requests, shared_rows=shared_rows)
    most, longest, answers = 8, 11, 9
    arrivals, ids = itertools.cycle(plan), itertools.count()
    since: dict[int, int] = {}
    for number in range(1200):
        while len(since) < most:
            prompt, length, fields = next(arrivals)
            sequence = Sequence(next(ids), [1] * prompt, prompt, prompt + length, **fields)
            since[sequence.request_id] = number
            scheduler.add(sequence)
        for each in run_pass(scheduler)[1]:
            del since[each.request_id]
        assert number - min(since.values(), default=number) <= (answers + 1) * most * longest
