"""Tensors on a GPU whose memory returns to the driver and comes back at the same addresses.

CUDA graphs have the addresses of all that they read and write, and so remain valid.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_runtime.gpu.driver_memory import DriverMemory

_logger = logging.getLogger(__name__)

PIECE = 64 << 20
"""Bytes that are mapped at once, so that tensors can be moved into an arena with little memory beside them."""
_ALIGNMENT = 512
"""Bytes of which the addresses of tensors are multiples, as those of PyTorch's allocator are."""


class Arena:
    """Addresses for several tensors, reserved while the arena or one of its tensors exists.

    While nothing is mapped, no tensor of it may be used. Not thread-safe.

    Args:
        device: The GPU, without an `obstacle` of `driver_memory`.
        sizes: Bytes of each tensor.

    Raises:
        EngineError: The driver refuses; other methods raise it too.
    """

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        self._device = device
        self._sizes = sizes
        self._offsets = [0]
        for size in sizes:
            self._offsets.append(_round_up(self._offsets[-1] + max(size, 1), _ALIGNMENT))
        self._reservation = _Reservation(device, self._offsets[-1])

    @property
    def num_bytes(self) -> int:
        """Of the memory that all tensors together take from the driver."""
        return self._reservation.size

    def map(self, count: int | None = None) -> None:
        """Take memory for the first ``count`` tensors, or for all; where there is some already, it stays.

        Raises:
            torch.OutOfMemoryError: There is too little; nothing has changed.
        """
        self._reservation.map(self._offsets[len(self._sizes) if count is None else count])

    def unmap(self) -> None:
        """Return all memory to the driver, after the GPU has finished its work."""
        self._reservation.unmap()

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor of this index, whose memory is mapped; its contents are undefined."""
        size, address = self._sizes[index], self._reservation.address + self._offsets[index]
        memory = tensor_at(address, max(size, 1), self._device, self._reservation)
        return memory[:size].view(dtype).view(*shape)


class _Reservation:
    """A range of addresses, and the memory at its beginning."""

    def __init__(self, device: torch.device, least: int) -> None:
        self._device = device
        self._memory = DriverMemory(device)
        self.size = _round_up(max(least, 1), self._memory.granularity)
        self.address = self._memory.reserve(self.size)
        self._piece = _round_up(PIECE, self._memory.granularity)
        self._mapped: list[tuple[int, int]] = []
        """Address and size of each piece, ascending and without gaps."""
        closing = weakref.finalize(self, _close, self._memory, device, self.address, self.size, self._mapped)
        closing.atexit = False  # The end of the process returns everything.

    def map(self, end: int) -> None:
        """Have memory from the beginning up to the offset ``end``, or a little more."""
        start = begin = sum(size for _, size in self._mapped)
        added: list[tuple[int, int]] = []
        try:
            while begin < end:
                size = min(self._piece, self.size - begin)
                self._map_piece(self.address + begin, size)
                added.append((self.address + begin, size))
                begin += size
            if added:
                self._memory.permit(self.address + start, begin - start)
        except BaseException:
            for piece in added:
                self._memory.unmap(*piece)
            raise
        self._mapped += added

    def unmap(self) -> None:
        """Return all memory."""
        _unmap(self._memory, self._device, self._mapped)

    def _map_piece(self, address: int, size: int) -> None:
        try:
            self._memory.map(address, size)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # PyTorch's allocator may have memory that nothing uses.
            self._memory.map(address, size)


def _unmap(memory: DriverMemory, device: torch.device, mapped: list[tuple[int, int]]) -> None:
    if mapped:
        torch.cuda.synchronize(device)
    while mapped:
        memory.unmap(*mapped[-1])
        mapped.pop()


def _close(memory: DriverMemory, device: torch.device, address: int, size: int, mapped: list[tuple[int, int]]) -> None:
    """Nothing has a tensor of it any more."""
    try:
        _unmap(memory, device, mapped)
        memory.free_addresses(address, size)
    except Exception as error:
        _logger.warning("%d bytes of addresses on %s can't be returned to the driver: %s", size, device, error)


class _Bytes:
    """Memory of a GPU for `torch.as_tensor`, which keeps this object as long as the tensor."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            **{"shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
        }


def tensor_at(address: int, size: int, device: torch.device, owner: object) -> Tensor:
    """uint8 [size] over mapped memory; ``owner`` lives as long as the tensor."""
    return torch.as_tensor(_Bytes(address, size, owner), device=device)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
