"""Sums over symmetric memory: their bits, which ranks have them, and what a lost rank does to a device that waits."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as torch_memory
from gpu_support import symmetric_scenarios
from gpu_support.fake_driver import INVALID, FakeDriver
from gpu_support.small_engine import generate, one_layer, small_engine
from gpu_support.symmetric import FakeSymmetricMemory, machine_with_gpus
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.gpu import peers
from megatron_runtime.parallel import symmetric_memory
from megatron_runtime.parallel.layout import ParallelSizes

TWO = ParallelSizes(tensor=2)
LENGTHS = (4, 2, 3)
BOUND = 20.0
"""Seconds: far below the time limit of the ranks."""
LAUNCHES_PER_LAYER = 11
"""With the sums of attention and network, whose parts are computed where the kernels of the sums read them."""
LAUNCHES_AROUND_LAYERS = 20
"""With the sum of the embedding's parts."""


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_sum_has_the_bits_of_the_order_of_the_ranks_in_each_batch(tensor: int) -> None:
    """On all ranks, and a row alone has those among others, also where its batch is summed in parts."""
    for said in run_ranks(symmetric_scenarios.add_up, tensor, ParallelSizes(tensor=tensor), free_port()):
        assert said["small"] == (True, {"one_shot"})
        assert said["large"] == (True, {"two_shot"} if tensor > 2 else set())
        assert said["by NCCL"] == (4, 0)
        assert said["on one rank"] == 2


@pytest.mark.parametrize("change", ["setting", "machine", "access", "rendezvous"])
def test_nccl_adds_up_on_all_ranks_if_one_of_them_cannot_share_memory(change: str) -> None:
    found = run_ranks(symmetric_scenarios.choose, 2, TWO, free_port(), change, 1)
    assert found == [([False], True)] * 2


def test_ranks_of_each_group_choose_for_it_alone() -> None:
    """Copies of dense layers add up what the experts of all of them computed, their own parts among two each."""
    sizes = ParallelSizes(tensor=2, expert=4)
    found = run_ranks(symmetric_scenarios.choose, 4, sizes, free_port(), "access", 3)
    assert found == [([True, False], True)] * 2 + [([False, False], True)] * 2
    assert run_ranks(symmetric_scenarios.choose, 4, sizes, free_port(), "", 0) == [([True, True], True)] * 4


def test_an_unknown_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(symmetric_memory.SETTING, "ring")
    with machine_with_gpus(0, FakeSymmetricMemory()), pytest.raises(ConfigurationError, match="use auto or nccl"):
        symmetric_memory._place(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("driver", "peer", "words"),
    [
        (FakeDriver(ordinal=1, linked={0}), "GPU-0", None),
        (FakeDriver(ordinal=1, others={0}), "GPU-0", "has no atomic operations"),
        (FakeDriver(ordinal=1, linked={0}, failing={"cuDeviceGet": INVALID}), "GPU-0", "has no atomic operations"),
        (FakeDriver(ordinal=1, linked={0}), "GPU-9", "does not see the GPU GPU-9"),
        (FakeDriver(ordinal=1, linked={0}), "GPU-1", "no access to the memory of GPU 1"),
    ],
)
def test_gpus_share_memory_over_links_with_atomic_operations(driver: FakeDriver, peer: str, words: str | None) -> None:
    with machine_with_gpus(1, FakeSymmetricMemory(), driver):
        found = peers.peer_obstacle(torch.device("cuda", 1), peer)
    assert found is None if words is None else words in (found or "")


def test_without_cuda_bindings_nccl_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ImportError("No module named 'cuda'")

    with machine_with_gpus(1, FakeSymmetricMemory()):
        monkeypatch.setattr(peers, "import_driver", absent)
        found = peers.peer_obstacle(torch.device("cuda", 1), "GPU-0")
    assert found == "the package cuda-bindings is missing (No module named 'cuda')"


def test_the_functions_of_pytorch_have_these_names_and_arguments() -> None:
    """Of the installed PyTorch, whose build for CPUs has their declarations."""
    for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_out"):
        declared = [each.name for each in getattr(torch.ops.symm_mem, name).default._schema.arguments]
        assert declared == [*inspect.signature(getattr(FakeSymmetricMemory, name)).parameters][1:]
    for name in ("empty", "rendezvous"):
        declared = [*inspect.signature(getattr(torch_memory, name)).parameters]
        given = [*inspect.signature(getattr(FakeSymmetricMemory, name)).parameters][1:]
        assert declared[: len(given)] == given or declared == ["size", "dtype", "device"]


def test_graphs_with_such_sums_give_the_tokens_of_the_cpu_and_wait_once(device_guard: Path) -> None:
    params = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    expected = generate(small_engine(one_layer()), params, None, LENGTHS)
    for said in run_ranks(symmetric_scenarios.answer, 2, TWO, free_port(), device_guard, params, LENGTHS):
        assert said["tokens"] == expected
        assert said["kinds"] == ["one_shot"]
        one, two = said["launches of a graph"]
        assert two - one <= LAUNCHES_PER_LAYER
        assert one - (two - one) <= LAUNCHES_AROUND_LAYERS
        assert said["step"] == (2, 2, 1, {}, 1)


@pytest.mark.parametrize("case", symmetric_scenarios.CASES)
def test_a_lost_rank_ends_the_waits_for_a_device_that_never_ends(case: str, device_guard: Path) -> None:
    """The error names it, and so does the next one; nothing waits for the device, also not at the end."""
    found: list[dict[str, Any] | None] = run_ranks(symmetric_scenarios.lose, 2, TWO, free_port(), device_guard, case, 1)
    assert found[1] is None
    said = found[0]
    assert said is not None
    assert said["missing"] == [1]
    assert "rank 1" in said["message"]
    assert said["stuck"]
    assert said["seconds"] < BOUND
    assert said["again"] == [1]
