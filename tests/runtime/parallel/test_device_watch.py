"""A host that waits for its device notices that another rank is lost, in real processes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from runtime_support import device_scenarios
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.parallel.gpu_collectives import GpuCollectives, without_error_handling
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.process_groups import ProcessGroups

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


class NoGroup:
    """Stands for a process group of NCCL, and notes the calls of its backend."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda: self._calls.append(f"{self._name}.{name}")


def test_all_communicators_are_aborted_in_one_group_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own tests do it for one of them, from another thread than the one that waits."""
    calls: list[str] = []
    named = {name: cast("dist.ProcessGroup", NoGroup(name, calls)) for name in ("pipeline", "tensor", "control")}
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    groups = ProcessGroups(**named, expert=named["tensor"], first=0, owns_world=True)
    GpuCollectives(groups, torch.device("cuda", 1)).abort()
    assert calls == ["tensor._group_start", "tensor.abort", "pipeline.abort", "tensor._group_end"]


@pytest.mark.parametrize("before", ["3", None])
def test_torch_leaves_errors_of_own_process_groups_alone(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with without_error_handling():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before
