"""The adapters of one decoder, each in a slot."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from megatron_runtime.model.device_memory import is_device_shortage
from megatron_runtime.model.forward_batch import AdapterRows
from megatron_runtime.model.kernels import adapter_kernel
from megatron_runtime.model.lora.adapted_linear import AdaptedLinear, CurrentRows, UpdateTable
from megatron_runtime.model.lora.adapter import Adapter, LowRankUpdate, read_adapter
from megatron_runtime.model.lora.targets import Place, Targets
from megatron_runtime.model.shard import Shard


class AdapterSlots:
    """Low-rank updates beside the weights of a rank, which keep them when weights are replaced or released.

    Args:
        shard: The rank's part of the model.
        dtype: The type of the weights.
        device: The device that computes.
    """

    def __init__(self, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        self._shard = shard
        self._dtype = dtype
        self._device = device
        self._current = CurrentRows()
        self._loaded: dict[int, Adapter] = {}

    @cached_property
    def targets(self) -> Targets:
        """The matrices that adapters change."""
        return Targets.of(self._shard)

    @cached_property
    def _tables(self) -> dict[Place, UpdateTable]:
        return {
            place: UpdateTable([part.height for part in parts], len(parts[0].columns), self._dtype, self._device)
            for place, parts in self.targets.parts.items()
        }

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def first_free(self) -> int:
        """The lowest slot that is not in use."""
        return next(slot for slot in range(len(self._loaded) + 1) if slot not in self._loaded)

    def read(self, path: Path, max_rank: int) -> Adapter:
        """Read an adapter, without using it; arguments and errors as for `read_adapter`."""
        return read_adapter(path, self.targets, self._dtype, max_rank)

    def put(self, slot: int, adapter: Adapter) -> None:
        """Use an adapter for the rows of a slot, which is free.

        Nothing changes if the device has too little memory for it, which raises a RuntimeError.
        """
        assert slot not in self._loaded, f"slot {slot} is in use"
        adapter_kernel.prepare(self._dtype)
        self._loaded[slot] = adapter
        try:
            self._restack(adapter.updates)
        except RuntimeError as error:
            if is_device_shortage(error):
                self.free(slot)
            raise

    def free(self, slot: int) -> None:
        """Release the memory of a slot."""
        self._restack(self._loaded.pop(slot).updates)

    def attach(self, layers: Iterable[nn.Module]) -> None:
        """Add the updates to the outputs of the linear modules of a decoder's layers."""
        by_number = dict(zip(self._shard.layers, layers, strict=True))
        for (number, path), table in self._tables.items():
            name, attribute = path.split(".")
            owner = by_number[number].get_submodule(name)
            base = getattr(owner, attribute)
            if not isinstance(base, AdaptedLinear):
                setattr(owner, attribute, AdaptedLinear(base, table, self._current))

    def begin(self, rows: AdapterRows | None) -> None:
        """A pass begins, whose rows have these adapters."""
        self._current.rows = rows

    def _restack(self, places: Iterable[Place]) -> None:
        for place in places:
            updates: dict[int, tuple[LowRankUpdate | None, ...]] = {
                slot: adapter.updates[place] for slot, adapter in self._loaded.items() if place in adapter.updates
            }
            self._tables[place].replace(updates)
