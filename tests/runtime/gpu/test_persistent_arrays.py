"""Arrays that stay where they are on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_support.pretended import DEVICE, Work, pretended_device
from gpu_support.pretended_graphs import PretendedEvent

from megatron_runtime.gpu.persistent_arrays import PersistentArrays
from megatron_runtime.parallel.single_rank import SingleRank

AWAIT = SingleRank().await_device

pytestmark = pytest.mark.usefixtures("device_guard")


def test_all_arrays_come_by_one_pinned_copy_to_the_same_place() -> None:
    with pretended_device() as device:
        arrays = PersistentArrays(
            {"rows": (np.int32, 3), "values": (np.float32, 2), "tokens": (np.int64, 1)}, DEVICE, AWAIT
        )
        there = dict(arrays.there)
        for step in range(3):
            device.work = Work()
            here = arrays.host_arrays()
            here["rows"][:] = [step, 2, 3]
            here["values"][:] = [0.5, step]
            here["tokens"][:] = 1 << 40
            arrays.send()
            assert (device.work.pinned_copies, +device.work.copies, +device.work.waits) == (1, {}, {})
            assert there["rows"].tolist() == [step, 2, 3]
            assert there["values"].tolist() == [0.5, step]
            assert there["tokens"].tolist() == [1 << 40]
    assert [each.dtype for each in there.values()] == [torch.int32, torch.float32, torch.int64]


def test_the_host_does_not_write_to_memory_that_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has two buffers, so it waits for the copy before the last."""
    waits: list[PretendedEvent] = []
    with pretended_device():
        monkeypatch.setattr(PretendedEvent, "query", lambda _: False)
        monkeypatch.setattr(PretendedEvent, "synchronize", lambda event: waits.append(event), raising=False)
        arrays = PersistentArrays({"rows": (np.int32, 3)}, DEVICE, AWAIT)
        buffers = []
        for _ in range(2):
            buffers.append(arrays.host_arrays()["rows"])
            arrays.send()
        assert not np.shares_memory(*buffers)
        assert waits == []
        assert np.shares_memory(arrays.host_arrays()["rows"], buffers[0])
        assert len(waits) == 1
