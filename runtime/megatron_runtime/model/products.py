"""Products of activations with weights, optionally with a fixed number of rows.

Libraries for GPUs choose a kernel, and with it the order of its sums, by the number of rows. In products with a fixed
number of rows, the bits of a row do not depend on the others, as far as the kernel computes each place of its tiles
alike; ``make gpu`` checks that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

FIXED_ROWS = 128
"""Rows of each product with `fix_rows`. By their data sheets, GPUs from A100 to B200 need less time to compute so many
rows in 16 bits than to read the weights, so that single requests take little longer; with fewer rows the weights would
be read more often."""


def write_linear(output: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `linear`, written to ``output``, [T, out], which is returned; ``inputs`` is [T, in]."""
    if bias is None:
        return torch.mm(inputs, weight.t(), out=output)
    return torch.addmm(bias, inputs, weight.t(), out=output)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: int | None) -> Tensor:
    """``y = x W^T + b``: [..., in] to [..., out].

    Args:
        inputs: The activations.
        weight: [out, in].
        bias: [out], or None.
        rows: The number of rows of each product, the last of which is padded with zeros; None: all in one product.
    """
    if rows is None:
        return functional.linear(inputs, weight, bias)
    flat = inputs.reshape(-1, inputs.shape[-1])
    count = len(flat)
    if missing := -count % rows:
        flat = functional.pad(flat, (0, 0, 0, missing))
    pieces = [functional.linear(piece, weight, bias) for piece in torch.split(flat, rows)]
    outputs = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return outputs[:count].view(*inputs.shape[:-1], len(weight))


def fix_rows(model: nn.Module) -> None:
    """Use FIXED_ROWS in all products of a model with weights: in the modules with an attribute ``rows_together``."""
    for module in model.modules():
        if hasattr(module, "rows_together"):
            setattr(module, "rows_together", FIXED_ROWS)  # noqa: B010 - a Module has no such attribute
