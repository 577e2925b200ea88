"""Arrays that a GPU gets by one copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gpu_support.pretended import DEVICE, Work, pretended_device

from megatron_runtime.engine.packed_arrays import on_device, on_host

ARRAYS = {
    "tokens": np.arange(5),
    "starts": np.arange(3, dtype=np.int32),
    "tables": np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:3],
    "rows": np.arange(0),
    "last": np.arange(2),
}


def test_a_gpu_gets_all_arrays_by_one_pinned_copy(device_guard: Path) -> None:
    del device_guard
    with pretended_device() as device:
        found = on_device(ARRAYS, DEVICE)
        assert (device.work.pinned_copies, +device.work.copies, +device.work.waits) == (1, {}, {})
        assert {each.device for each in found.values()} == {DEVICE}
        back = {name: each.cpu() for name, each in found.items()}
    for name, values in ARRAYS.items():
        assert torch.equal(back[name], torch.from_numpy(values.copy()))
        assert back[name].dtype == torch.from_numpy(values).dtype


def test_a_cpu_copies_nothing() -> None:
    found = on_device(ARRAYS, torch.device("cpu"))
    assert all(np.shares_memory(found[name].numpy(), values) for name, values in ARRAYS.items() if values.size)


def test_the_host_gets_all_tensors_by_one_copy(device_guard: Path) -> None:
    del device_guard
    given = torch.arange(3), torch.arange(12.0).view(3, 4)[:, 1:3], torch.empty(3, 0), torch.tensor([1.5])
    with pretended_device() as device:
        there = [each.to(DEVICE) for each in given]
        device.work = Work()
        found = on_host(*there)
        assert sum(device.work.waits.values()) == 1
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, given, strict=True))
    assert all(one is other for one, other in zip(on_host(*given), given, strict=True))
