"""Linear layers whose matrices stay quantized."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_runtime.model.formats.coded_rows import Coding
from megatron_runtime.model.kernels.coded_inputs import CodedInputs, code_inputs
from megatron_runtime.model.quantized.matrix import QuantizedMatrix


class QuantizedLinear(nn.Module):
    """``y = x W^T + b``: inputs are rounded to int8 by blocks of 32, and products are summed as integers.

    ``matrices`` are the rows of W in order; they may have different codings, as the projections of one layer do in
    files of mixed types. ``dtype`` is that of inputs and outputs. The bits of a row do not depend on the others.
    """

    def __init__(self, matrices: Sequence[QuantizedMatrix], bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrices = tuple(matrices)
        self.bias = bias
        self._dtype = dtype
        self._height = sum(matrix.rows for matrix in self.matrices)

    @property
    def weight(self) -> Tensor:
        """A dequantized copy of the matrix, [out, in]."""
        return torch.cat([matrix.whole(self._dtype) for matrix in self.matrices])

    def forward(self, inputs: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        rows = inputs.shape[0]  # In every layer, len() of a tensor would take a part of the time of a single row.
        outputs = inputs.new_empty(rows, self._height)
        given: dict[tuple[int, int], CodedInputs | Tensor] = {}
        column = 0
        for matrix in self.matrices:
            key = _inputs_of(matrix.coding)
            if key not in given:
                given[key] = inputs.contiguous() if rows == 1 else code_inputs(inputs, matrix.coding)
            bias = None if self.bias is None else self.bias[column : column + matrix.rows]
            matrix.multiply(given[key], bias, outputs, column)
            column += matrix.rows
        return outputs


def _inputs_of(coding: Coding) -> tuple[int, int]:
    """What coded inputs depend on."""
    return coding.group, coding.offset
