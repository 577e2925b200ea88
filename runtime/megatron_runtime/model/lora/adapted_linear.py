"""Linear layers with the updates of several adapters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_runtime.model.forward_batch import AdapterRows
from megatron_runtime.model.kernels import adapter_kernel
from megatron_runtime.model.kernels.row_kernels import has_cpu_row_kernels
from megatron_runtime.model.lora.adapter import LowRankUpdate
from megatron_runtime.model.products import linear


class UpdateTable:
    """The updates of one matrix by all adapters, stacked by slot.

    Args:
        widths: Number of outputs of each part of the matrix.
        in_features: Number of inputs.
        dtype: The type of the updates.
        device: The device of the matrix.
    """

    def __init__(self, widths: list[int], in_features: int, dtype: torch.dtype, device: torch.device) -> None:
        self._bounds: NDArray[np.int64] = np.cumsum([0, *widths])
        self._in_features = in_features
        self._dtype = dtype
        self._device = device
        self._down: Tensor | None = None
        """As for `adapter_kernel.add_low_rank`; None without updates."""

    def replace(self, updates: Mapping[int, tuple[LowRankUpdate | None, ...]]) -> None:
        """Stack the updates of all adapters, by slot."""
        given = [part for parts in updates.values() for part in parts if part is not None]
        if not given:
            self._down = None
            return
        slots, parts = max(updates) + 1, len(self._bounds) - 1
        most = adapter_kernel.padded_rank(max(len(update.down) for update in given))
        width = adapter_kernel.padded_width(self._in_features)
        down = torch.zeros(slots, parts, most, width, dtype=self._dtype)
        up = torch.zeros(slots, most, int(self._bounds[-1]), dtype=self._dtype)
        ranks = torch.zeros(slots, parts, dtype=torch.int64)
        scales = torch.zeros(slots, parts)
        for slot, update_parts in updates.items():
            for part, update in enumerate(update_parts):
                if update is not None:
                    rank = len(update.down)
                    down[slot, part, :rank, : self._in_features] = update.down
                    up[slot, :rank, self._bounds[part] : self._bounds[part + 1]] = update.up.t()
                    ranks[slot, part], scales[slot, part] = adapter_kernel.padded_rank(rank), update.scale
        there = up.to(self._device), down.flatten(1, 2).to(self._device)
        self._up, self._down = there
        self._ranks, self._scales = ranks, scales

    def add(self, inputs: Tensor, outputs: Tensor, rows: AdapterRows, rows_together: int | None) -> None:
        """Add each row's update to the outputs, in place: [T, in] to [T, out]."""
        if self._down is None:
            return
        if has_cpu_row_kernels(outputs):
            tables = self._down, self._up, self._ranks, self._scales
            adapter_kernel.add_low_rank(inputs, outputs, rows.slots, *tables, self._bounds)
            return
        for slot, chosen in rows.groups.items():
            if slot < len(self._down) and bool(self._ranks[slot].any()):
                self._add_one(inputs, outputs, slot, chosen, rows_together)

    def _add_one(self, inputs: Tensor, outputs: Tensor, slot: int, chosen: Tensor, rows_together: int | None) -> None:
        assert self._down is not None
        given, most = inputs[chosen], self._up.shape[1]
        sums = outputs[chosen]
        for part, rank in enumerate(self._ranks[slot].tolist()):
            if rank:
                begin, end = self._bounds[part], self._bounds[part + 1]
                down = self._down[slot, part * most : part * most + rank, : self._in_features]
                inner = linear(given, down, None, rows_together)
                inner = inner * float(self._scales[slot, part])
                update = linear(inner, self._up[slot, :rank, begin:end].t(), None, rows_together)
                sums[:, begin:end].add_(update)
        outputs[chosen] = sums


class CurrentRows:
    """The adapters of the rows of the pass that a decoder computes."""

    rows: AdapterRows | None = None


class AdaptedLinear(nn.Module):
    """A linear layer, with the updates of the adapters of each row.

    Args:
        base: The layer; has ``weight`` and ``bias``.
        table: The updates.
        current: The adapters of the rows of the present pass.
    """

    def __init__(self, base: nn.Module, table: UpdateTable, current: CurrentRows) -> None:
        super().__init__()
        self.base = base
        self._table = table
        self._current = current

    @property
    def weight(self) -> Tensor:
        """The matrix without updates, [out, in]."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer."""
        bias = self.base.bias
        assert bias is None or isinstance(bias, Tensor)
        return bias

    def forward(self, inputs: Tensor) -> Tensor:
        """[T, in] to [T, out]; rows without an adapter have the bits of the layer alone."""
        outputs: Tensor = self.base(inputs)
        if self._current.rows is not None:
            rows_together = getattr(self.base, "rows_together", None)
            self._table.add(inputs, outputs, self._current.rows, rows_together)
        return outputs
