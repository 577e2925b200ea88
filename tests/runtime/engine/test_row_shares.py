"""Passes on CPUs: answers of large bodies and tenants take turns while small ones run, so that passes stay short."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_support.clients import Client, client_of
from engine_support.scheduling import Passes, run_pass, scheduler_of, shares
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_runtime.engine.context_limits import ContextLimits
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.scheduling.draft_length import DraftLength
from megatron_runtime.engine.scheduling.row_shares import LATELY_PASSES
from megatron_runtime.engine.scheduling.schedule import Schedule
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence

SHARED = 32
MakeEngine = Callable[..., DynamicInferenceEngine]


def large_engine(shared_rows: int | None = SHARED, **limits: Any) -> Scheduler:
    return scheduler_of(4000, max_requests=256, max_tokens=2048, shared_rows=shared_rows, **limits)


def attacked(shared_rows: int | None) -> tuple[Scheduler, Client]:
    """A full engine with the answers of four bodies of 128, as of an attacker with four connections."""
    scheduler = large_engine(shared_rows)
    client = client_of(scheduler)
    for _ in range(4):
        client.send(128)
    for _ in range(3):
        assert len(run_pass(scheduler)[0].slices) == 256
    return scheduler, client


def tokens_until_done(scheduler: Scheduler, sequence: Sequence) -> list[int]:
    """The tokens of each pass until a sequence is done."""
    counts = []
    while sequence in scheduler:
        counts.append(sum(part.length for part in run_pass(scheduler)[0].slices))
    return counts


def bodies_of(schedule: Schedule) -> list[int]:
    """How many answers of each body are in a pass, ascending."""
    bodies = sorted(str(part.sequence.body) for part in schedule.slices)
    return sorted(len(list(group)) for _, group in itertools.groupby(bodies))


@pytest.mark.parametrize(("shared_rows", "most"), [(None, 256 + 4), (SHARED, SHARED + 4)])
def test_passes_of_a_small_body_have_few_rows_beside_large_bodies(shared_rows: int | None, most: int) -> None:
    scheduler, client = attacked(shared_rows)
    for _ in range(5):
        (small,) = client.send(1, length=4)
        counts = tokens_until_done(scheduler, small)
        assert len(counts) == 4
        assert max(counts) == most  # the prompt has five tokens
        assert most - 5 <= max(counts[1:]) <= most - 4  # a row is kept for the first one of the queue
    if shared_rows:
        rows = [len(run_pass(scheduler)[0].slices) for _ in range(LATELY_PASSES + 1)]
        assert max(rows[:-1]) <= SHARED
        assert rows[-1] > 250  # without a small body for a while, all are in the pass again


def serve_small(scheduler: Scheduler, client: Client) -> None:
    """A body of one answer, from its arrival to its end."""
    (small,) = client.send(1, length=4)
    tokens_until_done(scheduler, small)


def assert_few_rows_after_a_small_body(scheduler: Scheduler) -> None:
    for _ in range(LATELY_PASSES - 4):
        assert len(run_pass(scheduler)[0].slices) <= SHARED


def test_small_bodies_with_pauses_between_them_never_meet_a_pass_with_all_rows() -> None:
    scheduler, client = attacked(SHARED)
    for _ in range(5):
        serve_small(scheduler, client)
        assert_few_rows_after_a_small_body(scheduler)


def test_large_bodies_that_arrive_between_small_ones_do_not_fill_a_pass() -> None:
    scheduler = large_engine()
    client = client_of(scheduler)
    serve_small(scheduler, client)
    for _ in range(4):
        client.send(128)
    assert_few_rows_after_a_small_body(scheduler)


def test_a_tenant_with_few_answers_that_pauses_between_them_never_meets_a_pass_with_all_rows() -> None:
    scheduler = large_engine()
    many, few = client_of(scheduler), client_of(scheduler, "few")
    for _ in range(600):
        many.send(1, length=60)
    run_pass(scheduler)
    for _ in range(3):
        serve_small(scheduler, few)
        assert_few_rows_after_a_small_body(scheduler)


def test_several_small_bodies_do_not_wait_for_each_other() -> None:
    scheduler, client = attacked(SHARED)
    small = [client.send(1, length=4)[0] for _ in range(6)]
    passes = 0
    while any(each in scheduler for each in small):
        assert len(run_pass(scheduler)[0].slices) <= SHARED + 6
        passes += 1
    assert passes <= 5  # one pass more where a sequence was evicted for its place


def test_large_bodies_have_equal_numbers_of_rows_and_their_answers_take_turns() -> None:
    scheduler = large_engine()
    client = client_of(scheduler)
    large = [client.send(answers, length=1000) for answers in (60, 40)]
    client.send(1, length=1000)
    run_pass(scheduler)
    computed = {each.request_id: each.num_computed for body in large for each in body}
    for _ in range(30):
        schedule, _ = run_pass(scheduler)
        assert bodies_of(schedule) == [1, 15, 16]
    for body in large:
        progress = [each.num_computed - computed[each.request_id] for each in body]
        assert max(progress) - min(progress) <= 1


def uniform(client: Client, answers: int, bodies: int) -> list[Sequence]:
    """Bodies whose answers have different lengths, so that few answers of some bodies are left."""
    sequences = [each for _ in range(bodies) for each in client.send(answers, length=60)]
    for each in sequences:
        each.max_length -= each.request_id % 50
    return sequences


@pytest.mark.parametrize("tenants", [1, 2])
@pytest.mark.parametrize(("answers", "bodies"), [(1, 300), (4, 80), (16, 20), (128, 3)])
def test_all_running_answers_of_bodies_and_tenants_of_equal_size_are_in_each_pass(
    answers: int, bodies: int, tenants: int
) -> None:
    scheduler = large_engine()
    for name in ("", "other")[:tenants]:
        uniform(client_of(scheduler, name), answers, bodies)
    while scheduler.num_waiting:
        alive = scheduler.num_running + scheduler.num_waiting
        schedule, _ = run_pass(scheduler)
        assert len(schedule.slices) == min(alive, 256) or schedule.evicted


def test_bodies_of_up_to_four_times_the_answers_are_in_each_pass() -> None:
    scheduler = large_engine()
    client = client_of(scheduler)
    for answers in [4] * 20 + [1]:
        client.send(answers)
    assert [len(run_pass(scheduler)[0].slices) for _ in range(5)] == [81] * 5


def test_many_small_bodies_leave_a_large_one_some_rows() -> None:
    scheduler = large_engine()
    client = client_of(scheduler)
    client.send(128)
    for _ in range(60):
        client.send(1)
    run_pass(scheduler)
    assert bodies_of(run_pass(scheduler)[0]) == [1] * 60 + [4]


def test_a_tenant_with_many_answers_takes_turns_beside_one_with_few() -> None:
    scheduler = large_engine()
    many, few = client_of(scheduler), client_of(scheduler, "few")
    for _ in range(300):
        many.send(1, length=40)
    run_pass(scheduler)
    (own,) = few.send(1, length=20)
    others: set[int] = set()
    while own in scheduler:
        schedule, _ = run_pass(scheduler)
        assert own in [part.sequence for part in schedule.slices]
        assert len(schedule.slices) <= SHARED
        others |= {part.sequence.request_id for part in schedule.slices}
    assert len(others) == 256


@pytest.mark.parametrize(("priority", "rows"), [(0, SHARED), (1, 101)])
def test_a_small_body_of_a_lower_priority_does_not_limit_a_large_one(priority: int, rows: int) -> None:
    scheduler = large_engine()
    client = client_of(scheduler)
    client.send(100)
    client.send(1, priority=priority)
    run_pass(scheduler)
    assert len(run_pass(scheduler)[0].slices) == rows


def test_passes_of_a_pipeline_have_few_rows_each() -> None:
    scheduler = large_engine(passes=2)
    client, passes = client_of(scheduler), Passes(scheduler)
    for _ in range(4):
        client.send(128)
    for _ in range(4):
        passes.run()
    (small,) = client.send(1, length=4)
    while small in scheduler:
        assert len(passes.run()[0].slices) <= SHARED


def test_a_large_body_has_no_drafts_beside_a_small_one() -> None:
    scheduler = large_engine(block_size=80)
    client = client_of(scheduler)
    sequences = [each for answers in (40, 1) for each in client.send(answers)]
    run_pass(scheduler)
    for each in sequences:
        each.draft_length = DraftLength(4)
    scheduler.goodput = None  # which would begin with fewer drafts
    drafts = {part.sequence.answers: part.max_drafts for part in run_pass(scheduler)[0].slices}
    assert drafts == {40: 0, 1: 4}
    scheduler.remove(sequences[-1])
    for _ in range(LATELY_PASSES):
        run_pass(scheduler)
    assert {part.max_drafts for part in run_pass(scheduler)[0].slices} == {4}


@settings(max_examples=20, deadline=None)
@given(
    plan=st.lists(st.tuples(st.integers(0, 3), shares(), st.integers(-1, 1)), min_size=1, max_size=40),
    shared_rows=st.integers(1, 6),
    passes=st.integers(1, 3),
)
def test_each_running_sequence_has_a_row_in_a_bounded_number_of_passes_and_all_ranks_decide_equally(
    plan: list[tuple[int, dict[str, Any], int]], shared_rows: int, passes: int
) -> None:
    ranks = [scheduler_of(400, max_requests=24, max_tokens=200, shared_rows=shared_rows, passes=passes) for _ in "ab"]
    runs = [Passes(scheduler) for scheduler in ranks]
    last: dict[int, int] = {}
    ids = itertools.count()
    for number, (arrivals, fields, priority) in enumerate(plan * (150 // len(plan) + 1)):
        for _ in range(arrivals if ranks[0].num_waiting < 40 else 0):
            sequence = Sequence(next(ids), [1] * 3, 3, 23, priority=priority, **fields)
            for scheduler in ranks:
                scheduler.add(replace(sequence, tokens=list(sequence.tokens), blocks=[], block_hashes=[]))
        schedules = [run.run()[0] for run in runs]
        seen = [[(part.sequence.request_id, part.start, part.end) for part in each.slices] for each in schedules]
        assert seen[0] == seen[1]
        last |= dict.fromkeys([row[0] for row in seen[0]], number)
        for each in ranks[0].running_ids:
            assert number - last.setdefault(each, number) <= 24 * passes


def test_passes_have_a_limit_on_cpus_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.scheduler.limits.shared_rows == SHARED
    fields = {"dtype": torch.float32, "device_type": "cuda"}
    assert ContextLimits.derive(engine.controller.model.config, engine.config, **fields).shared_rows is None
