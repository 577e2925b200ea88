"""A host that waits for its device notices that another rank is lost, in real processes."""

from __future__ import annotations

import pytest
from runtime_support import device_scenarios
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.parallel.layout import ParallelSizes

BOUND = 20.0
"""Seconds: far below the time limit of the ranks, which is 30."""


@pytest.mark.parametrize(
    ("sizes", "victim"),
    [
        (ParallelSizes(tensor=2), 0),
        (ParallelSizes(tensor=2), 1),
        (ParallelSizes(tensor=4), 2),
        (ParallelSizes(tensor=2, pipeline=2), 1),
    ],
    ids=str,
)
def test_a_killed_rank_ends_the_waits_of_all_others_with_its_name(sizes: ParallelSizes, victim: int) -> None:
    """Also of ranks that have no connection to it."""
    found = run_ranks(device_scenarios.lose, sizes.ranks_per_replica_group, sizes, free_port(), victim, True)
    assert found.pop(victim) is None
    for noticed in found:
        assert noticed["missing"] == [victim], noticed
        assert f"{sizes.position_in_replica_group(victim).name} is missing" in noticed["message"]
        assert noticed["seconds"] < BOUND


def test_a_rank_that_is_late_ends_the_waits_of_others() -> None:
    found = run_ranks(device_scenarios.lose, 2, ParallelSizes(tensor=2), free_port(), 1, False)
    assert found[0]["missing"] == []
    assert "all ranks answer, so one is late; rank 1 is computing (timed out after " in found[0]["message"]


def test_the_owner_of_the_process_learns_of_a_lost_rank_if_the_abort_does_not_end() -> None:
    found = run_ranks(device_scenarios.lose_while_stuck, 2, ParallelSizes(tensor=2), free_port())
    assert found[0]["missing"] == [1]


def test_a_rank_that_leaves_in_order_is_not_reported() -> None:
    assert run_ranks(device_scenarios.leave_in_order, 2, ParallelSizes(tensor=2), free_port()) == [2.0, 2.0]


def test_an_error_of_the_work_itself_is_that_of_the_work() -> None:
    assert run_ranks(device_scenarios.fail_at_work, 2, ParallelSizes(tensor=2), free_port()) == ["wrong", "wrong"]
