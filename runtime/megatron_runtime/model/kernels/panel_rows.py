"""Parts of kernels that multiply rows of inputs with the panels of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from megatron_runtime.model.kernels.compiled import narrowed, widen
from megatron_runtime.model.kernels.product_instructions import COLUMNS, round_products


@njit(inline="always")
def pad_rows(inputs: Any, begin: Any, end: Any, padded: Any, multiple: Any) -> None:
    """Copy rows, with zeros after the last channel of each, and after the last row up to a multiple of rows."""
    width = inputs.shape[1]
    rows = end - begin
    for row in range(rows):
        padded[row, :width] = inputs[begin + row]
        padded[row, width:] = 0
    for row in range(rows, (rows + multiple - 1) // multiple * multiple):
        padded[row, :] = 0


@njit(inline="always")
def write_products(products: Any, bias: Any, outputs: Any, first: Any, count: Any, column: Any) -> None:
    """Round the products of ``count`` rows with a panel, whose first column is ``column``."""
    width, item = outputs.shape[1], outputs.itemsize
    if column + COLUMNS <= width:
        for row in range(count):
            from_row = products.ctypes.data + row * COLUMNS * 4
            to = outputs.ctypes.data + ((first + row) * width + column) * item
            if len(bias):
                round_products(outputs, 1, from_row, bias.ctypes.data + column * item, to)
            else:
                round_products(outputs, 0, from_row, 0, to)
        return
    for row in range(count):
        for lane in range(width - column):
            added = widen(bias[column + lane]) if len(bias) else np.float32(0)
            outputs[first + row, column + lane] = narrowed(products[row, lane] + added, outputs)
