"""A quantized matrix in the layout of the kernels."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.formats.coded_rows import BLOCK, QUAD, CodedRows, Coding
from megatron_runtime.model.host_memory import zeros
from megatron_runtime.model.kernels import stored_blocks
from megatron_runtime.model.kernels.coded_inputs import CodedInputs
from megatron_runtime.model.kernels.panel_products import PANEL, PARTS, Packing
from megatron_runtime.model.kernels.quantized_products import multiply
from megatron_runtime.model.kernels.vector_instructions import LANES


class QuantizedMatrix:
    """Codes, scales and mins of a matrix [rows, columns], whose columns are whole blocks; zero until it is filled."""

    def __init__(self, rows: int, columns: int, coding: Coding) -> None:
        self.rows, self.columns, self.coding = rows, columns, coding
        packing = Packing.of(coding)
        panels, blocks = -(-rows // PANEL), columns // BLOCK
        self._codes = zeros((panels, blocks, PARTS, packing.vectors, LANES, QUAD), torch.uint8)
        self._scales = zeros((panels, blocks, packing.groups, PANEL), torch.float16)
        self._mins = zeros((panels, blocks, PANEL) if coding.has_mins else (0,), torch.float16)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self._codes.nbytes + self._scales.nbytes + self._mins.nbytes

    @property
    def scales_per_row(self) -> int:
        """Number of scales and mins of a row."""
        return self.columns // self.coding.group + (self.columns // BLOCK if self.coding.has_mins else 0)

    def fill(self, start: int, given: CodedRows) -> None:
        """Store consecutive rows from the row ``start`` on, of a type with the coding of this matrix."""
        stored_blocks.store(given, start, self._codes, self._scales, self._mins)

    def rows_of(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows as ``dtype``, [len(indices), columns]."""
        panels, lanes = indices // PANEL, indices % PANEL
        groups = (len(indices), self.columns // self.coding.group)
        packed = self._codes[panels, :, lanes // LANES, :, lanes % LANES]
        codes = _unpack(packed, self.coding.bits).view(*groups, self.coding.group)
        scales = self._scales[panels, :, :, lanes].float().view(*groups, 1)
        values = (codes.float() - self.coding.offset) * scales
        if self.coding.has_mins:
            values += self._mins[panels, :, lanes].float()[..., None]
        return values.flatten(1).to(dtype)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """A copy of all rows as ``dtype``, [rows, columns]."""
        return self.rows_of(torch.arange(self.rows), dtype)

    def count_not_finite(self, rows: range) -> int:
        """The number of scales and mins of these rows that are NaN or infinite; others may be written meanwhile."""
        indices = torch.arange(rows.start, rows.stop)
        panels, lanes = indices // PANEL, indices % PANEL
        found = int((~self._scales[panels, :, :, lanes].isfinite()).sum())
        if self.coding.has_mins:
            found += int((~self._mins[panels, :, lanes].isfinite()).sum())
        return found

    def multiply(self, inputs: CodedInputs | Tensor, bias: Tensor | None, outputs: Tensor, column: int = 0) -> None:
        """``inputs W^T + bias`` in ``outputs`` from a column on, as in `quantized_products.multiply`."""
        multiply(inputs, self.coding, self._arrays, bias, outputs, range(column, column + self.rows))

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint16]]:
        scales, mins = (part.view(torch.uint16).numpy().reshape(-1) for part in (self._scales, self._mins))
        return self._codes.numpy().reshape(-1), scales, mins


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes of words in the layout of `stored_blocks`: [rows, blocks, vectors, QUAD] to [rows, columns]."""
    if bits == 8:
        return packed.flatten(1)
    codes = torch.cat((packed[:, :, :4] & 0x0F, packed[:, :, :4] >> 4), dim=2)
    if count := bits - 4:
        shifts = torch.arange(0, 8, count, dtype=torch.uint8)[:, None]
        high = (packed[:, :, 4:, None] >> shifts) & ((1 << count) - 1)
        codes |= high.flatten(2, 3) << 4
    return codes.flatten(1)
