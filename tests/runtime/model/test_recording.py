"""Recorded calls of kernels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.kernels.compiled import as_array
from megatron_runtime.model.kernels.recording import (
    LayerMemory,
    NotRecordableError,
    Recording,
    active_recording,
    empty_array,
    noted,
)

ROWS = 3


def add(one: NDArray[Any], other: NDArray[Any], total: NDArray[Any]) -> None:
    np.add(one, other, out=total)


@pytest.fixture
def recording() -> Recording:
    return Recording(ROWS, LayerMemory(4))


def test_calls_are_repeated_in_their_order_with_other_inputs(recording: Recording) -> None:
    given, other = np.arange(4.0), np.full(4, 10.0)
    with recording.active():
        recording.name_inputs([given, other], "batch")
        totals = [empty_array(4, np.float64) for _ in range(2)]
        noted(add)(given, other, totals[0])
        noted(add)(totals[0], given, totals[1])
    assert totals[1].tolist() == [10, 12, 14, 16]
    assert recording.sources == {"batch"}
    recording.repeat({"batch": [np.ones(4), np.zeros(4)]})
    assert totals[1].tolist() == [2, 2, 2, 2]
    assert given.tolist() == [0, 1, 2, 3]


def test_a_thread_records_its_own_calls_alone(recording: Recording) -> None:
    with recording.active(), ThreadPoolExecutor(1) as other:
        assert active_recording() is recording
        assert other.submit(active_recording).result() is None
        assert other.submit(noted, add).result() is add
    assert active_recording() is None
    assert noted(add) is add


def test_a_failed_pass_ends_the_recording(recording: Recording) -> None:
    with pytest.raises(ZeroDivisionError), recording.active():
        _ = 1 / 0
    assert active_recording() is None
    assert torch.ones(2).add(1).tolist() == [2, 2]


COMPUTING: list[Callable[[Tensor], Any]] = [
    lambda given: given + 1,
    lambda given: given.mul_(2),
    lambda given: torch.cat((given, given)),
    lambda _: torch.zeros(3),
    lambda given: given.sum().item(),
    lambda given: torch.nn.functional.linear(given, given),
    lambda given: given.t().contiguous(),
    lambda given: given[torch.tensor([1])],
    lambda given: torch.empty_like(given.t()),
    lambda _: torch.empty(2, device="meta"),
]


@pytest.mark.parametrize("compute", COMPUTING)
def test_what_pytorch_computes_is_refused(recording: Recording, compute: Callable[[Tensor], Any]) -> None:
    given = torch.ones(4, 4)
    with pytest.raises(NotRecordableError), torch.inference_mode(), recording.active():
        compute(given)


def test_views_and_memory_are_not_refused(recording: Recording) -> None:
    given = torch.arange(12.0).view(3, 4)
    with torch.inference_mode(), recording.active():
        views = [given.view(4, 3), given[:, 1:], given.flatten(), *given.split(2), given.contiguous(), given.t()]
        made = given.new_empty(3, 5), torch.empty_like(given), torch.empty(3, dtype=torch.bfloat16)
        array = as_array(made[2])
    assert all(each.untyped_storage().data_ptr() == given.data_ptr() for each in views)
    assert [(each.shape, each.dtype) for each in made] == [
        ((3, 5), torch.float32),
        ((3, 4), torch.float32),
        ((3,), torch.bfloat16),
    ]
    assert array.ctypes.data == made[2].data_ptr()


def addresses(recording: Recording, rows: int, layers: int) -> list[list[int]]:
    """Of the memory of each layer."""
    found = []
    with recording.active():
        for layer in range(layers):
            recording.begin_layer(layer)
            found.append([torch.empty(rows, width).data_ptr() for width in (2, 5 + 30 * (layer == 2))])
    return found


def test_a_layer_has_the_memory_of_the_last_but_one() -> None:
    memory = LayerMemory(4)
    first = addresses(Recording(3, memory), 3, 6)
    assert first[0][0] == first[2][0] == first[4][0]
    assert first[1] == first[3] == first[5]
    assert not {*first[0], first[2][1]} & {*first[1]}
    assert first[0][1] != first[2][1], "which needs more"
    size = memory.num_bytes
    assert size == 4 * (2 * 4 * (2 + 5) + 4 * 35)

    again = addresses(Recording(2, memory), 2, 6)
    assert again[0] == [first[0][0], first[2][1]], "the larger one is enough for all"
    assert memory.num_bytes == size
