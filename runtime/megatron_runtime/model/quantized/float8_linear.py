"""Linear layers whose matrices stay in fp8, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.kernels.row_kernels import has_gpu_row_kernels

if TYPE_CHECKING:
    from megatron_runtime.gpu.float8 import Float8Weights


_ROWS_TOGETHER = 1024
"""Rows that are checked at once."""


class Float8Linear(nn.Module):
    """``y = x W^T + b``: inputs are not rounded, and the bits of a row depend on the number of rows alone.

    Args:
        rows: Of W.
        columns: Of W.
        group: Columns of W that have one scale.
        kind: The type of the numbers, a float8 of torch.
        bias: b.
        dtype: Of inputs and outputs.
    """

    rows_together: int | None = None
    """Not None: the bits of a row do not depend on the number of rows, as in `products.linear`."""

    def __init__(
        self, rows: int, columns: int, group: int, kind: torch.dtype, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        groups = -(-columns // group)
        # As bytes, which all operators and devices can copy.
        self.codes = nn.Parameter(torch.empty(rows, columns, dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(groups, rows, dtype=torch.float32), requires_grad=False)
        """Of a group, those of consecutive rows are one behind the other, as the kernel reads them."""
        self.bias = bias
        self.group = group
        self.kind = kind
        self.dtype = dtype
        self.is_filled = False

    @property
    def weight(self) -> Tensor:
        """A copy of the matrix in the dtype, [out, in]; without memory until a checkpoint has filled it."""
        if not self.is_filled:
            return torch.empty(self.codes.shape, dtype=self.dtype, device="meta")
        scales = self.scales.t().repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        return (self.codes.view(self.kind).float() * scales).to(self.dtype)

    def fill(self, start: int, codes: Tensor, scales: Tensor) -> None:
        """Store consecutive rows from the row ``start`` on: float8 [rows, columns], and float32 [rows, groups]."""
        rows = slice(start, start + len(codes))
        self.codes[rows] = codes.contiguous().view(torch.uint8).to(self.codes.device)
        self.scales[:, rows] = scales.t().contiguous().to(self.scales.device)
        self.is_filled = True

    def count_not_finite(self, rows: range) -> int:
        """The number of codes and scales of these rows that are NaN or infinite."""
        found = int((~self.scales[:, rows.start : rows.stop].isfinite()).sum())
        for part in torch.split(self.codes[rows.start : rows.stop], _ROWS_TOGETHER):
            found += int((~part.view(self.kind).float().isfinite()).sum())
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if not has_gpu_row_kernels(inputs):
            return functional.linear(inputs, self.weight, self.bias)
        from megatron_runtime.gpu import float8  # Triton is not needed on other devices.

        flat = inputs.reshape(-1, inputs.shape[-1])
        outputs = float8.multiply(flat, self._weights(), self.bias, rows_are_fixed=self.rows_together is not None)
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])

    def use_kernels(self) -> None:
        """Launch the kernels of all numbers of rows, on a GPU; the weights may have any values."""
        from megatron_runtime.gpu import float8

        inputs = torch.zeros(1, self.codes.shape[1], dtype=self.dtype, device=self.codes.device)
        float8.use_kernels(inputs, self._weights(), self.bias)

    def like(self) -> Float8Linear:
        """One of the same sizes, unfilled, on the default device."""
        (rows, columns), bias = self.codes.shape, None
        if self.bias is not None:
            bias = nn.Parameter(torch.empty(rows, dtype=self.dtype), requires_grad=False)
        return Float8Linear(rows, columns, self.group, self.kind, bias, self.dtype)

    @property
    def kernel_key(self) -> tuple[object, ...]:
        """What the kernels are compiled for."""
        return tuple(self.codes.shape), self.group, self.kind, self.bias is not None

    def _weights(self) -> Float8Weights:
        from megatron_runtime.gpu import float8

        return float8.Float8Weights(self.codes, self.scales, self.group, float8.EXPONENTS[self.kind])
