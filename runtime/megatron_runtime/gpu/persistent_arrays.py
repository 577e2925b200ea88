"""Arrays on a GPU that stay where they are, as CUDA graphs need it, and get new contents by one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; kernels load from addresses that are multiples of it."""
_HOST_BUFFERS = 2
"""The host fills one while the copy from the other one may be in progress."""


class PersistentArrays:
    """One-dimensional arrays in one piece of device memory, with pinned host memory of the same layout.

    Args:
        fields: By name, the type and the number of elements.
        device: The GPU.
        await_event: Waits for an event, as `parallel.ranks.Ranks.await_device`.
    """

    def __init__(
        self,
        fields: Mapping[str, tuple[DTypeLike, int]],
        device: torch.device,
        await_event: Callable[[torch.cuda.Event], None],
    ) -> None:
        places, size = {}, 0
        for name, (dtype, count) in fields.items():
            places[name] = slice(size, size + count * np.dtype(dtype).itemsize)
            size += -(-(places[name].stop - size) // _ALIGNMENT) * _ALIGNMENT
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_buffers = [_HostBuffer(size, await_event) for _ in range(_HOST_BUFFERS)]
        dtypes = {name: np.dtype(dtype) for name, (dtype, _) in fields.items()}
        self.there: dict[str, Tensor] = {
            name: self._device_bytes[place].view(torch.from_numpy(np.empty(0, dtypes[name])).dtype)
            for name, place in places.items()
        }
        """The arrays on the device."""
        self._here: list[dict[str, NDArray[Any]]] = [
            {name: buffer.numpy[place].view(dtypes[name]) for name, place in places.items()}
            for buffer in self._host_buffers
        ]

    def host_arrays(self) -> Mapping[str, NDArray[Any]]:
        """The host's arrays for the next `send`, with old contents. Waits if a copy from them is in progress, which is
        the one before the last."""
        self._host_buffers[0].wait()
        return self._here[0]

    def send(self) -> None:
        """Copy all arrays from the host to the device, in the order of the current stream."""
        self._host_buffers[0].copy_to(self._device_bytes)
        self._host_buffers.reverse()
        self._here.reverse()


class _HostBuffer:
    """Pinned memory, and the end of the last copy from it."""

    def __init__(self, size: int, await_event: Callable[[torch.cuda.Event], None]) -> None:
        self._await_event = await_event
        self._pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        self.numpy: NDArray[np.uint8] = self._pinned.numpy()
        self._copied: torch.cuda.Event | None = None

    def copy_to(self, target: Tensor) -> None:
        target.copy_(self._pinned, non_blocking=True)
        self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def wait(self) -> None:
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            self._await_event(self._copied)
