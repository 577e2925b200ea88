"""The collectives of GPUs: over gloo, and what they ask of NCCL."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from runtime_support import device_scenarios
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.parallel.gpu_collectives import GpuCollectives, without_error_handling
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.process_groups import ProcessGroups


@pytest.mark.parametrize("as_on_gpus", [True, False])
def test_each_rank_with_logits_gets_the_bits_of_all_columns_in_float32(as_on_gpus: bool) -> None:
    """In each type, with rows of any number, and parts of equal and of different widths; on a CPU the first rank."""
    sizes = ParallelSizes(tensor=3)
    said = run_ranks(device_scenarios.gather_columns, 3, sizes, free_port(), as_on_gpus)
    assert said == [[True] * len(said[0])] * 3
    assert len(said[0]) == 3 * 3 * 3


class NoGroup:
    """Stands for a process group of NCCL and its backend; an abort ends once all others have begun."""

    def __init__(self, together: threading.Barrier) -> None:
        self._together = together
        self.aborts = 0

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self

    def abort(self) -> None:
        """As of the backend."""
        self._together.wait(timeout=30)
        self.aborts += 1


def test_all_communicators_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each one once, also if two kinds of exchanges share it."""
    together = threading.Barrier(2)
    pipeline, tensor, control = (NoGroup(together) for _ in range(3))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    named = {"pipeline": pipeline, "tensor": tensor, "expert": tensor, "control": control}
    groups = ProcessGroups(**cast("dict[str, Any]", named), first=0, owns_world=True)
    GpuCollectives(groups, torch.device("cuda", 1)).abort()
    assert [group.aborts for group in (pipeline, tensor, control)] == [1, 1, 0]


@pytest.mark.parametrize("before", ["3", None])
def test_torch_leaves_errors_of_own_process_groups_alone(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with without_error_handling():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before
