"""The recurrent states of the running sequences, in slots of equal size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_runtime.model.host_memory import zeros
from megatron_runtime.model.recurrent_config import RecurrentConfig


class RecurrentStates:
    """Slots for the states of ``num_slots`` sequences in all recurrent layers, float32.

    A sequence begins with states of zeros, which the layers do not read: the contents of a slot without a sequence
    have no meaning.
    """

    def __init__(self, config: RecurrentConfig, num_slots: int, device: torch.device) -> None:
        self._shapes = [(len(config.layers), num_slots, *shape) for shape in config.state_shapes]
        self._device = device
        self._storage: list[Tensor] | None = None
        self.restore()

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(math.prod(shape) for shape in self._shapes) * torch.float32.itemsize

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Views of the arrays of one recurrent layer, each [num_slots, ...]."""
        assert self._storage is not None, "the states were released"
        return tuple(array[index] for array in self._storage)

    def copy(self, source: int, target: int) -> None:
        """Copy the states of one slot to another one, in all layers."""
        assert self._storage is not None, "the states were released"
        for array in self._storage:
            array[:, target].copy_(array[:, source])

    def release(self) -> None:
        """Release the memory and the contents."""
        self._storage = None

    def offload(self) -> None:
        """Move the states to host memory. On a CPU they stay, and slots that were never used have no memory."""
        if self._storage is not None:
            self._storage = [array.to("cpu") for array in self._storage]

    def restore(self) -> None:
        """Make the states resident again, with their contents after `offload`."""
        if self._storage is not None:
            self._storage = [array.to(self._device) for array in self._storage]
        elif self._device.type == "cpu":
            self._storage = [zeros(shape, torch.float32) for shape in self._shapes]
        else:
            self._storage = [torch.zeros(shape, device=self._device) for shape in self._shapes]
