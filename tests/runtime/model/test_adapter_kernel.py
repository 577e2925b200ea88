"""The kernel of low-rank updates: its sums, and bits of a row that do not depend on the rows beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_runtime.model.kernels.adapter_kernel import ROWS, add_low_rank, padded_rank, padded_width

SHAPES = [
    ([1], 1, [[1]]),
    ([16, 33], 16, [[4, 0], [8, 4]]),
    ([5, 7, 64], 40, [[12, 4, 8], [0, 0, 0], [4, 4, 20]]),
    ([256], 100, [[64], [3]]),
]
"""Widths of the parts, number of inputs, and the ranks of each adapter's parts."""
ALIKE = [0, 0, 0, 0, -1, 1, 1, 1, 0, 1, 1, 1, 1, 1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]
"""The adapter of each row: longer and shorter runs of rows, rows without one, and one that changes other matrices."""


class Updates:
    """Random adapters of one matrix."""

    def __init__(self, widths: list[int], size: int, ranks: list[list[int]], dtype: torch.dtype) -> None:
        noise = torch.Generator().manual_seed(len(widths) + size)
        self.dtype, self.size, self.slots = dtype, size, np.array(ALIKE, np.int32)
        self.bounds = np.cumsum([0, *widths])
        self.ranks = torch.tensor([[padded_rank(rank) for rank in parts] for parts in ranks])
        most, out = int(self.ranks.max()), int(self.bounds[-1])
        self.scales = torch.rand(self.ranks.shape, generator=noise) + 0.5
        self.down = torch.zeros(len(ranks), len(widths) * most, padded_width(size), dtype=dtype)
        self.down[..., :size] = torch.randn(len(ranks), len(widths) * most, size, generator=noise)
        self.up = torch.randn(len(ranks), most, out, generator=noise).to(dtype)
        self.inputs = torch.randn(len(ALIKE), size, generator=noise).to(dtype)
        self.outputs = torch.randn(len(ALIKE), out, generator=noise).to(dtype)

    def add(self, first: int, end: int) -> Tensor:
        """The outputs of some rows, computed together, with their updates."""
        outputs = self.outputs[first:end].clone()
        tables = self.down, self.up, self.ranks, self.scales, self.bounds
        add_low_rank(self.inputs[first:end], outputs, self.slots[first:end], *tables)
        return outputs

    def expected(self) -> Tensor:
        """The same in float64, without a rounding."""
        sums = self.outputs.double()
        for row, slot in enumerate(ALIKE):
            for part, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
                if 0 <= slot < len(self.ranks):
                    first, rank = part * self.up.shape[1], int(self.ranks[slot, part])
                    down = self.down[slot, first : first + rank, : self.size].double()
                    inner = down @ self.inputs[row].double() * self.scales[slot, part].double()
                    sums[row, begin:end] += inner @ self.up[slot, :rank, begin:end].double()
        return sums


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> tuple[list[int], int, list[list[int]]]:
    found: tuple[list[int], int, list[list[int]]] = request.param
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sums_are_those_of_the_matrices(shape: tuple[list[int], int, list[list[int]]], dtype: torch.dtype) -> None:
    updates = Updates(*shape, dtype)
    close = {"rtol": 2**-8, "atol": 1e-3} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(updates.add(0, len(ALIKE)).double(), updates.expected(), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(
    shape: tuple[list[int], int, list[list[int]]], dtype: torch.dtype
) -> None:
    updates = Updates(*shape, dtype)
    alone = torch.cat([updates.add(row, row + 1) for row in range(len(ALIKE))])
    for first in range(ROWS + 1):
        assert torch.equal(updates.add(first, len(ALIKE)), alone[first:])
    untouched = updates.slots == -1
    assert torch.equal(alone[untouched], updates.outputs[untouched])
    assert not torch.equal(alone, updates.outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_stays_one(dtype: torch.dtype) -> None:
    updates = Updates(*SHAPES[2], dtype)
    updates.inputs[0, 0] = torch.nan
    updates.outputs[2:4, 3] = torch.nan
    outputs = updates.add(0, len(ALIKE))
    assert outputs[0].isnan().all()
    assert outputs[2:4, 3].isnan().all()
    assert not outputs[1:2].isnan().any()
